"""What measures speed and memory: `python -m bench.startup --help`."""

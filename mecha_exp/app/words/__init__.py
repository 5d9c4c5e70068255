"""The words of a command line: what people type, and the overrides that Hydra reads."""

"""A paper's table of one or several sweeps: the verdict on all of them, and its text."""

"""The verdict of a sweep: which point is chosen, how good it is, and what the data can tell apart."""

"""Planning a merge from the headers of its inputs: what is done at each key, and everything that is wrong."""

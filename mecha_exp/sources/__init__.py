"""State dicts that are read, as they are stored or as a view of another one."""

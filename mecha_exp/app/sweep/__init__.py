"""The points of a sweep: from the command line to a folder and a summary."""

"""The application: from a command line to merged, measured and tracked models."""

"""Configurations, composed by Hydra from the command line; jobs, and what Hydra answers itself."""

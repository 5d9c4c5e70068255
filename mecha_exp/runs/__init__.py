"""Runs and sweeps as they lie on disk: records, queries, values as text."""

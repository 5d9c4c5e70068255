"""Comparison with other projects, each in an environment of its own; see `make parity`."""

"""Outputs that are complete or absent: locks, journals, recovery, preflight checks of space."""

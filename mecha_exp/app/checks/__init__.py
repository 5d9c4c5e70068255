"""Checks of what was typed, before any work: whether it exists, and whether anything uses it."""

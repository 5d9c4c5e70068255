"""Conversions between model configs as merge methods, and the shortest path over them."""

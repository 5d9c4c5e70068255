"""Recipes as graphs of immutable nodes: models, literals, and calls of merge methods."""

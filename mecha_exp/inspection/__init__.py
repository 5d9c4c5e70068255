"""Descriptions of models, methods, recipes, runs and their differences, as data and as text."""

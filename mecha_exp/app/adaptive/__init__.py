"""Sweeps whose points follow from what was learned or measured before: learned weights, greedy soups."""

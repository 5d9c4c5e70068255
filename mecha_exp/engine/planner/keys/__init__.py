"""Differences between keys: missing and extra keys, values by key, keys that other keys need."""

"""The API of merge methods: how they are declared, bound to arguments, and found by name."""

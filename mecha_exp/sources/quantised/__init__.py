"""Quantised models read as the numbers that their codes stand for."""

"""Evaluators in processes and actors of their own, which are replaced when they hang or die."""

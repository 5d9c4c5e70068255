"""Evaluators in processes of their own, which are replaced when they hang or die."""

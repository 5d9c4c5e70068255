"""Evaluators that come with the project, each in a module of its name, imported when it is asked for."""

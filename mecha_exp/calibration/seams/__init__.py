"""What the package announces by entry points: two verbs, and files that a recipe has measured."""

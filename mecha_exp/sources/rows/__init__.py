"""Models whose rows of tokens are taken from other places: vocabularies by token, and not by number."""

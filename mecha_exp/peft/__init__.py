"""Adapters of PEFT: read as differences to a model, merged with each other, and written again."""

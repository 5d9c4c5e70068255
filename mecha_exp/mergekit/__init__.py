"""Configurations of mergekit, read as recipe graphs."""

from mecha_exp.mergekit.recipe import from_mergekit

__all__ = ["from_mergekit"]

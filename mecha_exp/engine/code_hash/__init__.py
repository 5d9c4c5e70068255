"""Hashes the code that decides what a merge method or an evaluator computes, function by function.

The hash of a function covers its syntax tree and, transitively, what it reaches by name: functions, classes,
and values of globals. Comments, docstrings, layout, help texts and code that is not reached change nothing.

Not covered: the standard library, torch and numpy; mecha_exp beside its merge methods and evaluators
(`lab.signature.FORMAT` is raised when their results change); what is reached by a computed name
(`getattr(module, name)`, `exec`). A package in `site-packages` counts by the hashes of its files that the
installer recorded.
"""

from mecha_exp.engine.code_hash.functions import of_function, sources
from mecha_exp.engine.code_hash.recipes import (
    code_hash,
    code_hashes,
    contents_of_paths,
    methods_of,
    reader_hashes,
    sources_of,
)

__all__ = [
    "code_hash",
    "code_hashes",
    "contents_of_paths",
    "methods_of",
    "of_function",
    "reader_hashes",
    "sources",
    "sources_of",
]

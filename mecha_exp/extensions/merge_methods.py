"""Merge methods: how they are declared and found."""

from mecha_exp.method import MergeMethod, all_methods, conversions, merge_method, resolve_method
from mecha_exp.nodes import value_to_node
from mecha_exp.signature import Parameter, Return, StateDict, StateDictKeyError

resolve = resolve_method
get_all = all_methods
get_all_converters = conversions

__all__ = [
    "MergeMethod",
    "Parameter",
    "Return",
    "StateDict",
    "StateDictKeyError",
    "get_all",
    "get_all_converters",
    "merge_method",
    "resolve",
    "value_to_node",
]

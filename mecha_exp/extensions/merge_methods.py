"""Merge methods: how they are declared and found."""

from mecha_exp.declaring import merge_method
from mecha_exp.method import MergeMethod
from mecha_exp.registry import all_methods, conversions, resolve_method
from mecha_exp.signature import Parameter, Return, StateDict, StateDictKeyError
from mecha_exp.values import value_to_node

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

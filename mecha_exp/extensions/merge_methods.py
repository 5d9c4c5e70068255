"""Merge methods: declaring and finding them."""

from mecha_exp.graph.literals import value_to_node
from mecha_exp.method_api.decorators import merge_method
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.parameters import Parameter, Return
from mecha_exp.method_api.registry import all_methods, conversions, resolve_method
from mecha_exp.method_api.state_dict import StateDict, StateDictKeyError

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

"""Merge methods: declaring them, finding them, and the helpers that methods may use.

The built-in methods import nothing of mecha_exp beside this, the public names and `mecha_exp.architectures`.
"""

from mecha_exp.architectures.views import viewed
from mecha_exp.checkpoint.dtypes import floating_dtype, round_to
from mecha_exp.conversion.lora import adapter_conversion
from mecha_exp.engine.compiler.primitives.columns import products_of_columns
from mecha_exp.engine.compiler.primitives.eigenvectors import Spectrum
from mecha_exp.engine.compiler.primitives.rows import row_dot, row_length, row_norm, row_sum
from mecha_exp.engine.compiler.primitives.runs import RunLoop
from mecha_exp.engine.compiler.primitives.sorting import ascending_order, ranks, whole_ranks
from mecha_exp.errors import counted, did_you_mean
from mecha_exp.graph.literals import value_to_node
from mecha_exp.method_api.decorators import merge_method
from mecha_exp.method_api.method import MergeMethod, is_constant, spread
from mecha_exp.method_api.parameters import Parameter, Return
from mecha_exp.method_api.registry import all_methods, conversions, resolve_method
from mecha_exp.method_api.state_dict import StateDict, StateDictKeyError
from mecha_exp.random import uniforms
from mecha_exp.sources.layers import LayersSource, Span
from mecha_exp.sources.source import RenamedSource, SourceView
from mecha_exp.sources.statistics.view import StatisticsSource
from mecha_exp.sources.views.approximation import ApproximatedRows, Approximation
from mecha_exp.sources.views.names import in_other_names
from mecha_exp.sources.views.row_table import RowTable
from mecha_exp.sources.views.rows import RowsSource

resolve = resolve_method
get_all = all_methods
get_all_converters = conversions

__all__ = [
    "ApproximatedRows",
    "Approximation",
    "LayersSource",
    "MergeMethod",
    "Parameter",
    "RenamedSource",
    "Return",
    "RowTable",
    "RowsSource",
    "RunLoop",
    "SourceView",
    "Span",
    "Spectrum",
    "StateDict",
    "StateDictKeyError",
    "StatisticsSource",
    "adapter_conversion",
    "ascending_order",
    "counted",
    "did_you_mean",
    "floating_dtype",
    "get_all",
    "get_all_converters",
    "in_other_names",
    "is_constant",
    "merge_method",
    "products_of_columns",
    "ranks",
    "resolve",
    "round_to",
    "row_dot",
    "row_length",
    "row_norm",
    "row_sum",
    "spread",
    "uniforms",
    "value_to_node",
    "viewed",
    "whole_ranks",
]

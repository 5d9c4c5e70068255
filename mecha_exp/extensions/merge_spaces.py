"""Merge spaces: `weight`, `delta`, `param`, and those that are registered."""

from mecha_exp.graph.spaces import (
    MergeSpace,
    MergeSpaceSymbol,
    get_all,
    get_identifiers,
    register_merge_space,
    resolve,
)

__all__ = [
    "MergeSpace",
    "MergeSpaceSymbol",
    "get_all",
    "get_identifiers",
    "register_merge_space",
    "resolve",
]

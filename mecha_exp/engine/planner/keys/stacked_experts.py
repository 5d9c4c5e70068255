"""Experts that lie stacked in one tensor, [experts, rows, columns], as transformers 5 has them.

A method of matrices takes such a tensor for one matrix with a row for each expert, and a trim ranks the
entries of all experts together. Both differ from the merge of a checkpoint with a tensor for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mecha_exp.engine.ir.program import Program
from mecha_exp.errors import some
from mecha_exp.graph.nodes import MergeNode, walk
from mecha_exp.method_api.method import Kind

_STACK = re.compile(r"(^|\.)(\w*_)?experts\.(?!\d)")


def is_stacked(key: str, shape: tuple[int, ...]) -> bool:
    """Whether a key holds several experts, by name and shape: `experts.down_proj` and not `experts.3.w2`."""
    is_bias = len(shape) == 2 and key.endswith("bias")
    return (len(shape) == 3 or is_bias) and shape[0] > 1 and _STACK.search(key) is not None


def sees_tensors_whole(program: Program, roots: Sequence[int]) -> bool:
    """Whether a method below some roots depends on more than an entry: all but elementwise ones."""
    nodes = walk(*(program.roots[root] for root in roots))
    return any(isinstance(node, MergeNode) and node.method.kind is not Kind.ELEMENTWISE for node in nodes)


def stacked_notice(keys: Sequence[str]) -> str:
    """A sentence about stacked experts that are merged as one tensor."""
    return (
        f"{len(keys)} keys hold several experts each, and the recipe has methods of whole tensors, rows or "
        f"ranks, which take all experts of a key together: {some(keys, 3)}. The merge of a checkpoint with a "
        "tensor for each expert is another one. Unfuse the experts first where that is meant."
    )

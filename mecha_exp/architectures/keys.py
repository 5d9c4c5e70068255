"""A key of a model config: its shape and dtype, alone or in a brace pattern, and whether it is a stack.

transformers 5 stacks the experts of a layer: `experts.gate_up_proj` is [experts, 2 inner, hidden], and in
gpt-oss and Llama 4 [experts, hidden, 2 inner]. Each expert is a matrix of its own, of gates and ups in one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mecha_exp.architectures.patterns import Pattern

STACKS = (
    r"(shared_)?experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(?P<bias>_bias)?",
    r"(mlp|self_attention\.experts)\.(input_linear|output_linear)\.weight",  # JetMoE
)
"""The ends of the names in transformers; `make hf` compares them with all its architectures."""

_KNOWN = re.compile(rf"(^|\.)({'|'.join(STACKS)})\Z")
_ENDS = ("_proj", "_bias", "_linear.weight")  # of all of these, for a quick look
_LIKELY = re.compile(r"(^|\.)(\w*_)?experts\.(?!\d)")


class HasShape(Protocol):
    """The description of a key: a `TensorInfo`, a `KeyInfo`, a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""

    @property
    def dtype(self) -> object:
        """The number format."""


class KeyInfo(NamedTuple):
    """A key of a config.

    Attributes:
        shape: the sizes.
        dtype: the usual dtype in files, by torch's name: `float32`.
        optional: whether a file of this config may lack it.
        aliases: its other names in files.
        stacked: whether it holds several experts, one for each place on its first axis; None: its name tells.
    """

    shape: tuple[int, ...]
    dtype: str
    optional: bool = False
    aliases: tuple[str, ...] = ()
    stacked: bool | None = None


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """Keys that a brace pattern describes together, without the component's prefix.

    Attributes:
        shape: ints, and names of sizes that are inferred from a file.
        aliases: patterns whose groups correspond to those of `names`.
        stacked: whether each holds several experts, one for each place on its first axis; None: names tell.
    """

    names: Pattern
    shape: tuple[int | str, ...]
    dtype: str
    optional: bool = False
    aliases: tuple[Pattern, ...] = ()
    stacked: bool | None = None


def is_stack(key: str, shape: tuple[int, ...], info: KeyInfo | None) -> bool | None:
    """Whether a key holds several experts, one for each place on its first axis; None where it is doubtful.

    Args:
        key, shape: of a tensor.
        info: what its model config says of it; where that is nothing, the name tells.
    """
    if info is not None and info.stacked is not None:
        return info.stacked
    return is_known_stack(key, shape) or (None if is_likely_stack(key, shape) else False)


def is_known_stack(key: str, shape: tuple[int, ...]) -> bool:
    """Whether transformers names a stack of experts so: matrices, or vectors where they are biases."""
    match = _KNOWN.search(key) if len(shape) in (2, 3) and key.endswith(_ENDS) else None
    return match is not None and len(shape) == (2 if match["bias"] else 3)


def is_likely_stack(key: str, shape: tuple[int, ...]) -> bool:
    """Whether a key of any project looks like a stack: `experts.w1` of three axes, and not `experts.3.w1`."""
    is_bias = len(shape) == 2 and key.endswith("bias")
    return (len(shape) == 3 or is_bias) and shape[0] > 1 and _LIKELY.search(key) is not None

"""The kind of each key of a model: what its tensor is for, told by its name and its shape.

Merge methods are made for some kinds. Selectors of values by key name them: `kind:matrix`, and `axes:2` for
all tensors of two axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mecha_exp.errors import RecipeError, did_you_mean, nearest
from mecha_exp.families import HEADS, LOOKED_UP

if TYPE_CHECKING:
    from mecha_exp.architectures.anatomy import Anatomy

KINDS = {
    "matrix": "tensors of two axes that are nothing of what follows: linear layers, attention",
    "convolution": "tensors of three axes and more that are nothing of what follows",
    "experts": "stacked matrices of experts, `[experts, rows, columns]`",
    "embedding": "tables of tokens, positions and classes",
    "head": "the output layer with its biases and norms: `lm_head`, `classifier`, `score`",
    "text_projection": "CLIP's, which the code of TSV-Merge and Iso-C leaves out",
    "vector": "norms, biases and tables of them, all else of one axis or none",
    "running_statistics": "what batch norms have measured",
}
"""The kinds of keys and what they are; each key is of one."""

KIND, AXES = "kind:", "axes:"
"""The prefixes of selectors by kind and by the number of axes."""

_STATISTICS = re.compile(r"running_(mean|var)|moving_(mean|variance)|num_batches_tracked")
_NO_OUTPUT = re.compile(r"(\w+_)?(attention|attn|router)")
"""Modules in which the same names are those of other layers, such as `attention.q_head`."""

_BESIDE = frozenset({"decoder", "dense", "layernorm", "norm", "pooler", "projector"})
"""Parts of heads, where they stand beside the module that is the whole base model."""

_OUTPUT = re.compile(
    r"(?!(.+\.)?\d+\.)(.+\.)?"
    r"(fc|output|output_layer|logits|proj_out|final_linear|final_layer\.linear|norm_out\.linear_2)"
)
"""Output layers by names that are those of matrices inside of numbered layers."""

_SHIFTS = re.compile(r"(.+\.)?(scale_shift_table|modulation)")
"""Biases in a table, with a row for each use."""


def kind_of(key: str, axes: int, is_stack: bool) -> str:
    """The kind of a key by itself; see `KINDS`, and `_kinds` for those that the keys beside it decide.

    Args:
        key: its name.
        axes: how many its tensor has.
        is_stack: whether it holds several experts, one for each place on its first axis.
    """
    if _head_by_name(key) is not None:
        return "head"
    path = key.removesuffix(".weight")
    *modules, name = path.split(".")
    if _STATISTICS.fullmatch(name):
        return "running_statistics"
    if axes < 2 or name == "bias" or _SHIFTS.fullmatch(key):
        return "vector"
    if is_stack:
        return "experts" if axes > 2 else "vector"
    if axes < 4 and LOOKED_UP.fullmatch(name):
        return "embedding"
    if axes > 2:
        return "convolution"
    if "text_projection" in (*modules, name):
        return "text_projection"
    return "head" if _OUTPUT.fullmatch(path) else "matrix"


def _head_by_name(key: str) -> str | None:
    """The module of a key that is an output layer by its name, from the outermost on; None if none is."""
    modules = key.split(".")
    for depth, module in enumerate(modules, 1):
        if _NO_OUTPUT.fullmatch(module):
            return None
        if HEADS.fullmatch(module):
            return ".".join(modules[:depth])
    return None


def keys_selected(selector: str, anatomy: Anatomy) -> frozenset[str] | None:
    """The keys that `kind:NAME` or `axes:N` selects; None for any other selector.

    Raises:
        RecipeError: there is no such kind, or N is not a number.
    """
    if selector.startswith(KIND):
        kind = require_kind(selector.removeprefix(KIND))
        return frozenset(key for key, its_kind in _kinds(anatomy) if its_kind == kind)
    if selector.startswith(AXES):
        number = selector.removeprefix(AXES)
        if not number.isdecimal():
            raise RecipeError(f"'{selector}': expected the number of axes, such as 'axes:2'.")
        infos = anatomy.infos.items()
        return frozenset(key for key, info in infos if len(info.shape) == int(number))
    return None


def kinds_in(anatomy: Anatomy) -> list[str]:
    """The kinds of keys that a model has, in the order of `KINDS`."""
    held = {kind for _, kind in _kinds(anatomy)}
    return [kind for kind in KINDS if kind in held]


def _kinds(anatomy: Anatomy) -> Iterator[tuple[str, str]]:
    """The kind of each key: all keys of a module that is an output layer are of the head."""
    alone = {key: kind_of(key, len(info.shape), anatomy.is_stack(key)) for key, info in anatomy.infos.items()}
    heads = [key for key, kind in alone.items() if kind == "head"]
    modules = {key.removesuffix(".weight") for key in heads if _head_by_name(key) is None}
    if heads and _has_base_module(alone):
        modules |= _BESIDE
    for key, kind in alone.items():
        yield key, "head" if any(f"{key}.".startswith(f"{module}.") for module in modules) else kind


def _has_base_module(keys: Iterable[str]) -> bool:
    """Whether one module holds all numbered layers and more, as `bert` does beside `classifier`."""
    paths = [key.split(".") for key in keys]
    holders = {path[0] for path in paths if any(map(str.isdecimal, path[1:]))}
    inside = [path for path in paths if path[0] in holders]
    depth = next((n for n, names in enumerate(zip(*inside, strict=False)) if len({*names}) > 1), 0)
    return len(holders) == 1 and not any(path[depth].isdecimal() for path in inside)


def require_kind(name: str) -> str:
    """The name of a kind.

    Raises:
        RecipeError: there is no kind of that name.
    """
    if name not in KINDS:
        raise RecipeError(f"'{name}' is not a kind of keys: {', '.join(KINDS)}.{did_you_mean(name, KINDS)}")
    return name


def near_kind(name: str) -> str:
    """A hint for a selector that means a kind; empty if it is not near to one."""
    near = nearest(name, list(KINDS), cutoff=0.8)
    return f" Did you mean '{KIND}{near[0]}'?" if near else ""

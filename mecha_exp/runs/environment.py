"""Whether a result was made with this torch and on a processor like this one, which decide rounding."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Mapping

from mecha_exp.system.machine import machine

_TORCH, _KERNELS, _FEATURES = "version/torch", "machine/torch_uses", "machine/vector_features"
_MKL = "machine/mkl_cbwr"


@functools.cache
def deciding_facts() -> dict[str, str]:
    """The facts of this process that decide bits, by their tags in a record."""
    return {_TORCH: importlib.metadata.version("torch"), **machine()}


def differs_from_here(tags: Mapping[str, str]) -> tuple[str, ...]:
    """What a result was made with that is otherwise here; empty where all is alike or nothing is recorded.

    Args:
        tags: of the result's record.
    """
    here = deciding_facts()
    words = []
    if tags.get(_TORCH, here[_TORCH]) != here[_TORCH]:
        words.append(f"torch {tags[_TORCH]} (here {here[_TORCH]})")
    if tags.get(_KERNELS, here[_KERNELS]) != here[_KERNELS]:
        words.append(f"torch's kernels for {tags[_KERNELS]} (here {here[_KERNELS]})")
    if _FEATURES in tags and (more := _other_features(tags[_FEATURES], here.get(_FEATURES, ""))):
        words.append(f"a processor {more}")
    if _KERNELS in tags and tags.get(_MKL) != here.get(_MKL):
        words.append(f"MKL_CBWR={tags.get(_MKL, '')} (here {here.get(_MKL) or 'unset'})")
    return tuple(words)


def are_mixed(tags: Iterable[Mapping[str, str]]) -> bool:
    """Whether some results were made with another torch or processor than the others."""
    facts = [tuple(of.get(name) for name in (_TORCH, _KERNELS, _FEATURES, _MKL)) for of in tags]
    return len(set(facts)) > 1


def _other_features(there: str, here: str) -> str:
    """The vector features that only one of two processors has, in words."""
    lacking = [name for name in here.split() if name not in there.split()]
    more = [name for name in there.split() if name not in here.split()]
    parts = [f"without {', '.join(lacking)}"] if lacking else []
    return " and ".join([*parts, *([f"with {', '.join(more)}"] if more else [])])

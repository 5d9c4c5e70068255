# mypy: disable-error-code="valid-type"
"""How far a merged model is from its inputs, measured in the pass that makes it.

The sums of one key are a few numbers, and those of a model, a component or a block are the sums of its
keys', so that one pass answers for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mecha_exp.checkpoint import round_to, torch_dtype
from mecha_exp.graph.nodes import ModelNode, Node
from mecha_exp.method_api.decorators import merge_method, reduction
from mecha_exp.method_api.parameters import Parameter, Return


@merge_method(elementwise=True, register=False)
def as_stored(a: Parameter(Tensor), dtype: Parameter(str)) -> Return(Tensor):
    """The values of a, rounded to the dtype (by its safetensors name) that it is stored in."""
    return round_to(a, torch_dtype(dtype)).to(a.dtype)


@reduction(sums=True, register=False)
def moments(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor, "param"):
    """[|a|^2, |b|^2, |a - b|^2] over the whole tensor.

    The squares are float64: every float32 has one, the largest and the smallest too. The inner product
    follows from the three. A further input costs one more sum for each result, since the squares of either
    are shared.
    """
    a, b = a.double(), b.double()
    return a.square(), b.square(), (a - b).square()


@dataclass(frozen=True)
class Statistics:
    """A merged tensor, or model, beside one of its inputs.

    Attributes:
        norm: the Euclidean norm of the merged one.
        input_norm: that of the input.
        distance: the Euclidean norm of their difference.
        cosine: of the angle between them, -1 to 1; NaN where one of them is zero, or beyond 1e150.
    """

    norm: float
    input_norm: float
    distance: float
    cosine: float

    @property
    def relative_change(self) -> float:
        """distance / input_norm; NaN where the input is zero."""
        return self.distance / self.input_norm if self.input_norm else math.nan

    def metrics(self, name: str) -> dict[str, float]:
        """The metrics of a run that compare it with the input of that name."""
        return {
            f"weights/{metric}/{name}": getattr(self, metric)
            for metric in ("distance", "relative_change", "cosine")
        }


def statistics_of(stored: Node, models: Sequence[ModelNode]) -> dict[ModelNode, Node]:
    """For each input in weight space the node whose value is the `moments` of the stored result and it.

    A result that is a difference has none: it is not comparable with a model.
    """
    if stored.merge_space != "weight":
        return {}
    return {model: moments(stored, model) for model in models if model.merge_space == "weight"}


def summarise(
    by_key: Mapping[str, Tensor], group_of: Callable[[str], str] = lambda _: ""
) -> dict[str, Statistics]:
    """The statistics of groups of keys, from the `moments` of each key."""
    if not by_key:
        return {}
    groups: dict[str, int] = {}
    group = [groups.setdefault(group_of(key), len(groups)) for key in by_key]
    totals = np.zeros((len(groups), 3))
    np.add.at(totals, group, torch.stack(list(by_key.values())).numpy())  # in the order of the keys
    return {name: _statistics(*total) for name, total in zip(groups, totals.tolist(), strict=True)}


def _statistics(merged: float, original: float, apart: float) -> Statistics:
    norm, input_norm = math.sqrt(merged), math.sqrt(original)
    product = (merged + original - apart) / 2
    lengths = norm * input_norm
    cosine = max(-1.0, min(1.0, product / lengths)) if 0 < lengths < math.inf else math.nan
    return Statistics(norm, input_norm, math.sqrt(apart), cosine)

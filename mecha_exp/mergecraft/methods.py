"""mergecraft's merge functions by the merge methods of this package, computed by its engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mecha_exp.api import merge
from mecha_exp.errors import ConfigError, RecipeError, counted
from mecha_exp.graph.nodes import InMemory, ModelNode, Node, call
from mecha_exp.mergecraft.arithmetic import StateDict
from mecha_exp.mergecraft.decorators import model_merge
from mecha_exp.numbers import is_whole

Models = Sequence[StateDict]


@model_merge
def soup(models: Models, weights: Sequence[float] | None = None) -> StateDict:
    """The mean of the models, or sum_i w_i model_i / sum_i w_i.

    Source: Model soups, Wortsman et al. 2022, arXiv:2203.05482.
    """
    chosen = [1.0] * len(models) if weights is None else list(map(float, weights))
    return _computed(call("linear", *_nodes(models), weights=chosen))


@model_merge
def task(models: Models, base_index: int = 0, signs: Sequence[int] | None = None) -> StateDict:
    """base + sum_i sign_i (model_i - base) / n over the n models beside the base.

    Source: Task arithmetic, Ilharco et al. 2022, arXiv:2212.04089; the mean is mergecraft's.
    """
    base, others = _around(models, base_index)
    signs = [1] * len(others) if signs is None else list(signs)
    if len(signs) != len(others) or any(sign not in (-1, 1) for sign in signs):
        raise RecipeError(
            f"signs: expected 1 or -1 for each of {counted(len(others), 'model')}, got {signs}."
        )
    weights = [sign / len(others) for sign in signs]
    return _computed(call("task_arithmetic", base, *others, weights=weights))


@model_merge
def ties(models: Models, base_index: int = 0, k: float = 0.1) -> StateDict:
    """TIES as in its paper: the fraction k of each difference to the base is kept, by magnitude.

    mergecraft takes one threshold for all models together, of magnitudes in float16.
    Source: TIES-Merging, Yadav et al. 2023, arXiv:2306.01708.
    """
    base, others = _around(models, base_index)
    return _computed(call("ties", base, *others, density=float(k), variant="paper"))


@model_merge
def dare(models: Models, base_index: int = 0, p: float = 0.5, seed: int = 0) -> StateDict:
    """base + the mean of the differences to it, with entries dropped at the rate p and the others / (1 - p).

    mergecraft divides by the number of models that kept an entry instead of by all. A seed draws one mask.
    Source: DARE, Yu et al. 2023, arXiv:2311.03099.
    """
    base, others = _around(models, base_index)
    if not 0 <= p < 1:
        raise RecipeError(f"p: expected a fraction of at least 0 and below 1, got {p}.")
    weights = [1 / len(others)] * len(others)
    return _computed(call("dare_linear", base, *others, density=1 - p, weights=weights, seed=seed))


@model_merge
def stock(models: Models, base_index: int = 0) -> StateDict:
    """Model Stock as in its paper: the angle between differences to the base, by tensor.

    mergecraft takes the angle between the mean of the models and the base themselves.
    Source: Model Stock, Jang et al. 2024, arXiv:2403.19522.
    """
    base, others = _around(models, base_index)
    return _computed(call("model_stock_pairwise", base, *others))


@model_merge
def slerp(models: Models, tau: float = 0.5) -> StateDict:
    """Spherical interpolation of two models, tensor by tensor: tau 0 is the first, 1 the second.

    The norm is interpolated, too. mergecraft interpolates without unit vectors.
    Source: Shoemake 1985.
    """
    if len(models) != 2:
        raise RecipeError(f"slerp: it interpolates between two models, got {len(models)}.")
    return _computed(call("slerp", *_nodes(models), alpha=float(tau)))


def fisher(*_: Any, **__: Any) -> StateDict:
    """Fisher merging, which is refused: it needs gradients over data.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "fisher: the diagonals of the Fisher information are estimated from data, which is not done here. "
        "With diagonals of your own it is sum_i F_i model_i / sum_i F_i: docs/mergecraft.md shows it."
    )


def _nodes(models: Models) -> list[Node]:
    return [ModelNode(InMemory(model, f"model {number}")) for number, model in enumerate(models)]


def _around(models: Models, base_index: int) -> tuple[Node, list[Node]]:
    """The base, and the models beside it."""
    nodes = _nodes(models)
    if len(nodes) < 2 or not is_whole(base_index) or not -len(nodes) <= base_index < len(nodes):
        raise RecipeError(
            f"base_index: expected the number of the base among two models or more, got {base_index} of "
            f"{len(nodes)}."
        )
    base = nodes.pop(base_index)
    return base, nodes


def _computed(recipe: Node) -> StateDict:
    merged = merge(recipe, strict_merge_space="weight")
    assert not isinstance(merged, os.PathLike)
    return StateDict(merged)

# mypy: disable-error-code="valid-type"
"""Running statistics of normalisation layers: which of them a merged model gets.

A running variance is not a weight. A sum of differences can make it negative, and the network gives NaN then.
So a method of differences (task arithmetic, TIES, DARE, ...) leaves the statistics of its first model as they
are, and a mean of models pools them: with weights w, means m and variances v the result has the mean
sum w m and the variance sum w v + sum w (m - sum w m)^2, those of the models' data taken together.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mecha_exp.checkpoint import TensorInfo
from mecha_exp.engine.ir.expansion import expand
from mecha_exp.engine.ir.interpreter import run_eagerly
from mecha_exp.engine.ir.layout import compile_program
from mecha_exp.engine.ir.model_values import has_model_values, with_model_values
from mecha_exp.engine.ir.program import DeferredCall, DeferredRunner
from mecha_exp.engine.options import AUTO
from mecha_exp.engine.planner.keys.specialisation import Specialisation
from mecha_exp.graph.nodes import ModelNode, Node, models_of, walk
from mecha_exp.method_api.decorators import merge_method
from mecha_exp.method_api.parameters import Parameter, Return
from mecha_exp.method_api.state_dict import StateDict, Tile
from mecha_exp.method_api.views import is_data

MEANS = ("running_mean", "moving_mean")
VARIANCES = ("running_var", "moving_variance")
"""The last words of the keys, in the same order as those of the means."""
_NAMES = (*MEANS, *VARIANCES)

_DESCRIBED = {
    "base": "those of the first input",
    "pool": "pooled over the inputs",
    "merge": "merged like weights",
}


def is_running_statistic(key: str) -> bool:
    """Whether a key is a running mean or variance."""
    return key.endswith(_NAMES) and key.rpartition(".")[2] in _NAMES


def describe(policy: str, count: int, shown: str) -> str:
    """A sentence about the running statistics of a merge for its plan."""
    others = " or ".join(f"running_stats={choice}" for choice in _DESCRIBED if choice != policy)
    return (
        f"{count} running statistics of normalisation layers are {_DESCRIBED[policy]}: {shown}. "
        f"{others} chooses otherwise."
    )


@merge_method(register=False)
def pooled_mean(
    *models: Parameter(StateDict[Tensor]), weights: Parameter(list[float]), **extra: object
) -> Return(Tensor):
    """sum_i w_i m_i."""
    key = str(extra["key"])
    return sum(weight * model[key] for weight, model in zip(weights, models, strict=True))


@merge_method(register=False)
def pooled_variance(
    *models: Parameter(StateDict[Tensor]), weights: Parameter(list[float]), **extra: object
) -> Return(Tensor):
    """sum_i w_i v_i + sum_i w_i (m_i - sum_j w_j m_j)^2; without running means the first sum alone."""
    key = str(extra["key"])
    variance = sum(weight * model[key] for weight, model in zip(weights, models, strict=True))
    mean_key = _mean_beside(key)
    if not all(mean_key in model for model in models):
        return variance
    means = [model[mean_key] for model in models]
    middle = sum(weight * mean for weight, mean in zip(weights, means, strict=True))
    apart = (weight * (mean - middle).square() for weight, mean in zip(weights, means, strict=True))
    return variance + sum(apart)


@merge_method(elementwise=True, register=False)
def not_negative(a: Parameter(Tensor)) -> Return(Tensor):
    """max(a, 0), entry by entry."""
    return a.clamp(min=0)


def _mean_beside(key: str) -> str:
    """The key of the running mean beside a running variance."""
    module, dot, word = key.rpartition(".")
    return f"{module}{dot}{MEANS[VARIANCES.index(word)]}"


class RunningStatistics:
    """Replaces the graphs of running statistics by what `running_stats` says.

    Args:
        choice: the option.
        owner: runs the methods that read two keys.

    Attributes:
        policies: what was done with each key, by (recipe, policy).
    """

    def __init__(self, choice: str, owner: DeferredRunner) -> None:
        self._choice = choice
        self._owner = owner
        self._weights: dict[tuple[Node, tuple[int, ...]], tuple[float, ...] | None] = {}
        self._replaced: dict[tuple[Specialisation, bool, tuple[int, ...]], Specialisation] = {}
        self._policies: dict[tuple[Node, tuple[int, ...]], str] = {}
        self.policies: dict[tuple[int, str], list[str]] = {}

    def apply(self, key: str, specialised: Specialisation, info: TensorInfo | None) -> Specialisation:
        """The specialisation of a key, with the graphs of running statistics in place of those of weights."""
        if info is None or not is_running_statistic(key):
            return specialised
        is_variance = key.rpartition(".")[2] in VARIANCES
        kind = (specialised, is_variance, info.shape)
        if kind not in self._replaced:
            roots = tuple(self._replacement(root, is_variance, info.shape) for root in specialised.roots)
            self._replaced[kind] = replace(specialised, roots=roots)
        for recipe, root in enumerate(specialised.roots):
            if root is not None and not specialised.lacking[recipe] and _merges(root):
                policy = self._policy(root, info.shape)
                self.policies.setdefault((recipe, policy), []).append(key)
        return self._replaced[kind]

    def _replacement(self, root: Node | None, is_variance: bool, shape: tuple[int, ...]) -> Node | None:
        if root is None or not _merges(root):
            return root
        policy, models = self._policy(root, shape), _models_of(root)
        if policy == "base":
            return next(model for model in models if model.merge_space == "weight")
        if policy == "merge":
            return not_negative(root) if is_variance else root
        share = 1 / len(models)
        weights = self._weights_of(root, shape) or (share,) * len(models)
        weights = weights if min(weights) >= 0 else (share,) * len(models)
        method = pooled_variance if is_variance else pooled_mean
        return DeferredCall(method(*models, weights=list(weights)), self._owner)

    def _policy(self, root: Node, shape: tuple[int, ...]) -> str:
        if self._choice != AUTO:
            return self._choice
        if (root, shape) not in self._policies:
            self._policies[root, shape] = self._choose(root, shape)
        return self._policies[root, shape]

    def _choose(self, root: Node, shape: tuple[int, ...]) -> str:
        """The policy for a graph: `base` where there are differences or weights below zero."""
        if len(_models_of(root)) == 1 or any(node.merge_space == "delta" for node in walk(*expand([root]))):
            return "base"
        weights = self._weights_of(root, shape)
        return "base" if weights and min(weights) < 0 else "pool"

    def _weights_of(self, root: Node, shape: tuple[int, ...]) -> tuple[float, ...] | None:
        if (root, shape) not in self._weights:
            self._weights[root, shape] = weights_of_mean(root, shape)
        return self._weights[root, shape]


def _merges(root: Node) -> bool:
    """Whether a graph makes a model of several models or of one that it changes."""
    is_model = root.merge_space == "weight" and not isinstance(root, ModelNode | DeferredCall)
    return is_model and any(model.merge_space == "weight" for model in _models_of(root))


def _models_of(root: Node) -> list[ModelNode]:
    """The models that a graph reads, without statistics of them on data."""
    return [model for model in models_of(root) if not is_data(model)]


def weights_of_mean(root: Node, shape: tuple[int, ...]) -> tuple[float, ...] | None:
    """The weight of each model of a graph that takes their mean; None for any other graph.

    The graph is tried out: a model of ones among models of zeros gives its weight, everywhere. The weights of
    a mean sum to 1; one below zero is an extrapolation.
    """
    models = _models_of(root)
    weights = [_response(root, shape, model) for model in models]
    if None in weights or abs(sum(weights) - 1) > 1e-9:  # type: ignore[arg-type]
        return None
    return tuple(weight if abs(weight) > 1e-12 else 0.0 for weight in weights if weight is not None)


def _response(root: Node, shape: tuple[int, ...], one: ModelNode) -> float | None:
    """The value of a graph where one model is 1 everywhere and the others 0; None if there is not one."""
    (expanded,) = expand([root])
    if has_model_values(*with_model_values([expanded])):
        return None  # what they are hangs on other keys
    program = compile_program([expanded], torch.float64)
    if any(isinstance(node, DeferredCall) for node in program.extents):
        return None
    leaves: dict[Node, Tensor] = {
        model: torch.full(shape, float(model is one), dtype=torch.float64) for model in models_of(expanded)
    }
    try:
        with torch.no_grad():
            whole = Tile("running statistics", 0, math.prod(shape), shape)
            values = run_eagerly(program, whole, leaves, torch.float64)
    except Exception:  # of a method that cannot take such numbers
        return None
    first = float(values.reshape(-1)[0]) if values.numel() else 0.0
    return first if bool((values == first).all()) else None

"""Formulas of the first built-in methods, of three models, written out naively in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import mecha_exp as m
from mecha_exp.random import uniforms

Array = NDArray[np.float64]


def lerp(a: Array, b: Array, t: float) -> Array:
    return (1 - t) * a + t * b


def slerp(a: Array, b: Array, t: float) -> Array:
    norm_a, norm_b = math.sqrt((a * a).sum()), math.sqrt((b * b).sum())
    if not norm_a or not norm_b:
        return lerp(a, b, t)
    omega = math.acos(max(-1, min(1, (a * b).sum() / (norm_a * norm_b))))
    if math.sin(omega) < 1e-7:
        return lerp(a, b, t)
    direction = (math.sin((1 - t) * omega) * a / norm_a + math.sin(t * omega) * b / norm_b) / math.sin(omega)
    return direction * ((1 - t) * norm_a + t * norm_b)


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def ties(deltas: list[Array], k: float, vote_sgn: bool = False) -> Array:
    trimmed = []
    for delta in deltas:
        values = delta.reshape(-1).tolist()
        threshold = sorted(map(abs, values))[max(int((1 - k) * len(values)), 1) - 1]
        trimmed.append([x if abs(x) >= threshold else 0.0 for x in values])
    merged = []
    for entries in zip(*trimmed, strict=True):
        elected = sign(sum(entries) if vote_sgn else sum(map(sign, entries)))
        agreeing = [x for x in entries if sign(x) == elected]
        merged.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
    return np.array(merged).reshape(deltas[0].shape)


def model_stock(deltas: list[Array]) -> Array:
    columns = deltas[0].shape[-1] if deltas[0].ndim else 1
    rows = []
    for row in zip(*(delta.reshape(-1, columns) for delta in deltas), strict=True):
        norms = [max(math.sqrt((r * r).sum()), 1e-6) for r in row]
        pairs = range(len(row) - 1)
        cosine = sum((row[i] * row[i + 1]).sum() / (norms[i] * norms[i + 1]) for i in pairs) / len(pairs)
        below = 1 + (len(row) - 1) * cosine
        rows.append(np.mean(row, axis=0) * (len(row) * cosine / below if abs(below) > 1e-9 else 0))
    return np.concatenate(rows).reshape(deltas[0].shape)


def perpendicular(a: Array, b: Array) -> Array:
    length = (a * a).sum()
    return b - a * ((a * b).sum() / length) if length else np.zeros_like(b)


def dropped(key: str, deltas: list[Array], density: float, seed: int, rescale: bool = True) -> list[Array]:
    kept = [uniforms(key, 0, d.size, seed, i).reshape(d.shape) < density for i, d in enumerate(deltas)]
    return [d * mask / (density if rescale else 1) for d, mask in zip(deltas, kept, strict=True)]


def mean_of_kept(key: str, deltas: list[Array], density: float, seed: int) -> Array:
    kept = [uniforms(key, 0, d.size, seed, i).reshape(d.shape) < density for i, d in enumerate(deltas)]
    return sum(d * mask for d, mask in zip(deltas, kept, strict=True)) / np.maximum(
        sum(map(np.int64, kept)), 1
    )


def agreeing(deltas: list[Array], weights: list[float]) -> Array:
    weighted = [d * w for d, w in zip(deltas, weights, strict=True)]
    positive = sum(weighted) >= 0
    return sum(np.where(d > 0, positive, ~positive) * d for d in weighted)


@dataclass
class Case:
    """A recipe over three models, and what it must give for one key."""

    recipe: Callable[[m.Node, m.Node, m.Node], m.Node]
    formula: Callable[[str, Array, Array, Array], Array]


CASES = {
    "weighted_sum": Case(
        lambda a, b, c: m.weighted_sum(a, b, alpha=0.3),
        lambda key, a, b, c: lerp(a, b, 0.3),
    ),
    "weighted_sum beyond": Case(
        lambda a, b, c: m.weighted_sum(a, b, alpha=-1.5),
        lambda key, a, b, c: lerp(a, b, -1.5),
    ),
    "n_average": Case(
        lambda a, b, c: m.n_average(a, b, c),
        lambda key, a, b, c: (a + b + c) / 3,
    ),
    "subtract": Case(
        lambda a, b, c: m.subtract(a, b),
        lambda key, a, b, c: a - b,
    ),
    "scale": Case(
        lambda a, b, c: m.scale(m.subtract(a, b), alpha=-0.7),
        lambda key, a, b, c: -0.7 * (a - b),
    ),
    "add_difference of a delta": Case(
        lambda a, b, c: m.add_difference(a, m.subtract(b, c), alpha=0.4),
        lambda key, a, b, c: a + 0.4 * (b - c),
    ),
    "add_difference": Case(
        lambda a, b, c: m.add_difference(a, b, c, alpha=0.4),
        lambda key, a, b, c: a + 0.4 * (b - c),
    ),
    "operators": Case(
        lambda a, b, c: a + 0.5 * (b - a) - 0.25 * (c - a),
        lambda key, a, b, c: a + 0.5 * (b - a) - 0.25 * (c - a),
    ),
    "task_arithmetic": Case(
        lambda a, b, c: m.task_arithmetic(a, b, c, weights=0.4),
        lambda key, a, b, c: a + 0.4 * (b - a) + 0.4 * (c - a),
    ),
    "task_arithmetic with weights": Case(
        lambda a, b, c: m.task_arithmetic(a, b, m.subtract(c, b), weights=[0.4, -2], scale=0.5),
        lambda key, a, b, c: a + 0.5 * (0.4 * (b - a) - 2 * (c - b)),
    ),
    "slerp": Case(
        lambda a, b, c: m.slerp(a, b, alpha=0.3),
        lambda key, a, b, c: slerp(a, b, 0.3),
    ),
    "slerp of deltas": Case(
        lambda a, b, c: m.slerp(m.subtract(a, c), m.subtract(b, c)),
        lambda key, a, b, c: slerp(a - c, b - c, 0.5),
    ),
    "perpendicular_component": Case(
        lambda a, b, c: m.perpendicular_component(m.subtract(a, c), m.subtract(b, c)),
        lambda key, a, b, c: perpendicular(a - c, b - c),
    ),
    "ties_sum": Case(
        lambda a, b, c: m.ties_sum(m.subtract(a, b), m.subtract(b, c), m.subtract(c, a), k=0.35),
        lambda key, a, b, c: ties([a - b, b - c, c - a], 0.35),
    ),
    "ties_sum that trims nothing": Case(
        lambda a, b, c: m.ties_sum(m.subtract(a, b), m.subtract(b, c)),
        lambda key, a, b, c: ties([a - b, b - c], 1.0),
    ),
    "ties_sum that keeps one": Case(
        lambda a, b, c: m.ties_sum(m.subtract(a, b), k=0.0),
        lambda key, a, b, c: ties([a - b], 0.0),
    ),
    "add_difference_ties": Case(
        lambda a, b, c: m.add_difference_ties(a, b, c, alpha=0.7, k=0.5),
        lambda key, a, b, c: a + 0.7 * ties([b - a, c - a], 0.5),
    ),
    "add_difference_ties by value": Case(
        lambda a, b, c: m.add_difference_ties(a, b, c, k=0.8, vote_sgn=True),
        lambda key, a, b, c: a + ties([b - a, c - a], 0.8, vote_sgn=True),
    ),
    "add_difference_ties_extended": Case(
        lambda a, b, c: m.add_difference_ties_extended(a, b, c, alpha=0.7, k=0.5, vote_sgn=True),
        lambda key, a, b, c: a + 0.7 * ties([b - a, c - a], 0.5, vote_sgn=True),
    ),
    "model_stock": Case(
        lambda a, b, c: m.model_stock(m.subtract(a, b), m.subtract(b, c), m.subtract(a, c)),
        lambda key, a, b, c: model_stock([a - b, b - c, a - c]),
    ),
    "n_model_stock": Case(
        lambda a, b, c: m.n_model_stock(a, b, c),
        lambda key, a, b, c: a + model_stock([b - a, c - a]),
    ),
    "dropout": Case(
        lambda a, b, c: m.dropout(a, b, c, probability=0.4, alpha=0.7, rescale=0.5, seed=9),
        lambda key, a, b, c: a + 0.7 * mean_of_kept(key, [b - a, c - a], 0.6, 9) / 0.6**0.5,
    ),
    "dropout_deltas": Case(
        lambda a, b, c: m.dropout_deltas(m.subtract(b, a), m.subtract(c, a), probability=0.4, seed=9),
        lambda key, a, b, c: mean_of_kept(key, [b - a, c - a], 0.6, 9) / 0.6,
    ),
    "norm": Case(
        lambda a, b, c: m.add_difference(a, m.subtract(b, c), alpha=m.norm(m.subtract(a, c))),
        lambda key, a, b, c: a + math.sqrt(((a - c) ** 2).sum()) * (b - c),
    ),
    "dare_linear": Case(
        lambda a, b, c: m.dare_linear(a, b, c, weights=[0.5, 2], density=0.3, seed=9),
        lambda key, a, b, c: a
        + sum(w * d for w, d in zip((0.5, 2), dropped(key, [b - a, c - a], 0.3, 9), strict=True)),
    ),
    "dare_linear not rescaled": Case(
        lambda a, b, c: m.dare_linear(a, b, density=0.3, rescale=False, scale=0.5),
        lambda key, a, b, c: a + 0.5 * dropped(key, [b - a], 0.3, 0, rescale=False)[0],
    ),
    "dare_ties": Case(
        lambda a, b, c: m.dare_ties(a, b, c, weights=[0.5, 2], density=0.6, scale=0.9),
        lambda key, a, b, c: a + 0.9 * agreeing(dropped(key, [b - a, c - a], 0.6, 0), [0.5, 2]),
    ),
}  # fmt: skip
entries = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3.0])

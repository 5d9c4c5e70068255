"""Formulas of methods without another project as oracle, written out naively in float64."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

import mecha_exp as m

Array = NDArray[np.float64]
Recipe = Callable[[Sequence[m.Node]], m.Node]
Formula = Callable[[str, Sequence[Array]], Array]
DEPTHS = {"number": 0.0, "vector": 0.25, "wide": 0.5, "tall": 1.0, "filters": 0.75, "ties": 0.1}


def lerp(a: Array, b: Array, t: float) -> Array:
    return (1 - t) * a + t * b


def quotient(a: Array, b: Array, otherwise: float = 0.0) -> Array:
    return np.where(b == 0, otherwise, a / np.where(b == 0, 1, b))


def norm(a: Array) -> float:
    return float(np.sqrt((a * a).sum()))


def likeness(a: Array, b: Array) -> Array:
    return (quotient(a * b, np.maximum(abs(a), abs(b)) ** 2, otherwise=1) + 1) / 2


def similarity_add_difference(a: Array, b: Array, c: Array, alpha: float, beta: float) -> Array:
    s = beta * likeness(a, b)
    return (1 - s) * (a + alpha * (b - c)) + s * lerp(a, b, alpha / 2)


def euclidean_add_difference(a: Array, b: Array, c: Array, alpha: float) -> Array:
    da, db = a - c, b - c
    total = lerp(a, b, alpha) - c
    mean_square = (1 - alpha) * (da / (norm(da) or 1)) ** 2 + alpha * (db / (norm(db) or 1)) ** 2
    direction = np.copysign(np.sqrt(mean_square), total)
    return c + direction / (norm(direction) or 1) * norm(total)


def train_difference(a: Array, b: Array, c: Array, alpha: float) -> Array:
    far, near = abs(b - a), abs(b - c)
    return a + 1.8 * alpha * quotient(far, far + near) * (b - c)


def strict_train_difference(a: Array, b: Array, c: Array, alpha: float) -> Array:
    larger = np.maximum(abs(a - c), abs(b - c))
    mask = alpha * np.maximum(0, quotient((c - a) * (b - c), larger**2))
    return a + mask * (b - c)


def smooth_add(a: Array, b: Array, c: Array, alpha: float) -> Array:
    """supermerger calls the same two functions of scipy."""
    return a + alpha * ndimage.gaussian_filter(ndimage.median_filter(b - c, size=3), sigma=1)


def extract(a: Array, b: Array, c: Array, alpha: float, beta: float, gamma: float) -> Array:
    rows = [x.reshape(-1, x.shape[-1] if x.ndim else 1) for x in (a, b - a, c - a)]
    made = []
    for base, db, dc in zip(*rows, strict=True):
        cosine = (db * dc).sum() / (norm(db) * norm(dc)) if norm(db) * norm(dc) else 0
        d = ((cosine + 1) / 2) ** gamma
        made.append(base + lerp(db, dc, alpha) * lerp(d, 1 - d, beta))
    return np.array(made).reshape(a.shape)


def distribution_crossover(a: Array, b: Array, c: Array, alpha: float, tilt: float) -> Array:
    """The Fourier transform by its matrix; of a half spectrum the other half is its conjugate."""
    order = sorted(range(c.size), key=c.reshape(-1).tolist().__getitem__)
    matrix = np.exp(-2j * np.pi * np.outer(range(c.size), range(c.size)) / c.size)
    low, high = (matrix @ x.reshape(-1)[order] for x in (a, b))
    crossed = np.zeros(c.size, dtype=np.complex128)
    half = c.size // 2
    for place in range(half + 1):
        frequency = place / max(half, 1)
        share = float(frequency > 1 - alpha)
        if tilt:
            share = min(max((frequency + alpha - 1) / np.tan(np.pi * tilt / 2) + alpha, 0), 1)
        crossed[place] = lerp(low[place], high[place], share)
        crossed[-place] = crossed[place].conjugate() if place else crossed[0]
    made = np.empty(c.size)
    made[order] = (np.linalg.inv(matrix) @ crossed).real
    return made.reshape(c.shape)


def median(*x: Array) -> Array:
    return np.sort(np.stack(x), axis=0)[(len(x) - 1) // 2]


def iso_c(base: Array, *x: Array, most_axes: int = 2) -> Array:
    deltas = [model - base for model in x]
    if not 2 <= base.ndim <= most_axes:
        return base + 0.7 * sum(deltas) / len(x)
    u, s, vh = np.linalg.svd(sum(deltas).reshape(len(base), -1), full_matrices=False)
    return base + 0.7 * s.mean() * (u @ vh).reshape(base.shape)


def tsv_m(base: Array, *x: Array, most_axes: int = 2) -> Array:
    deltas = [model - base for model in x]
    if not 2 <= base.ndim <= most_axes:
        return base + 0.7 * sum(deltas) / len(x)
    parts = [np.linalg.svd(delta.reshape(len(base), -1), full_matrices=False) for delta in deltas]
    count = len(parts[0][1]) // len(x)
    u = nearest_orthogonal(np.hstack([u[:, :count] for u, _, _ in parts]))
    s = np.hstack([s[:count] for _, s, _ in parts])
    v = nearest_orthogonal(np.hstack([vh[:count].T for _, _, vh in parts]))
    return base + 0.7 * (u @ np.diag(s) @ v.T).reshape(base.shape)


def nearest_orthogonal(matrix: Array) -> Array:
    """M (M^T M)^(-1/2)."""
    sizes, vectors = np.linalg.eigh(matrix.T @ matrix)
    return matrix @ vectors @ np.diag(sizes**-0.5) @ vectors.T


def lines(depth: float, base: Array, *x: Array) -> Array:
    return base + (0.2 + 0.6 * depth) * sum(w * (y - base) for w, y in zip((0.5, 1, -2), x, strict=True))


def uses(deltas: Sequence[Array], threshold: float) -> list[Array]:
    return [abs(d) >= threshold * abs(sum(deltas) - d) for d in deltas]


def consensus(base: Array, *x: Array, least: int, threshold: float) -> Array:
    deltas = [model - base for model in x]
    return base + 0.7 * np.where(sum(map(np.int64, uses(deltas, threshold))) >= least, sum(deltas), 0)


def tall_mask(base: Array, *x: Array, task: int, threshold: float) -> Array:
    deltas = [model - base for model in x]
    return base + 0.7 * np.where(uses(deltas, threshold)[task], sum(deltas), 0)


def elected(base: Array, *x: Array, density: float, weights: Sequence[float]) -> Array:
    """Trim each task vector, elect a sign for each entry, and add what agrees with its weight."""
    deltas = []
    for model in x:
        delta = model - base
        kept = max(int(density * delta.size), 1)
        least = np.sort(abs(delta).ravel())[-kept]
        deltas.append(np.where(abs(delta) >= least, delta, 0))
    sign = np.sign(sum(deltas))
    return base + 0.7 * sum(
        w * np.where((np.sign(d) == sign) & (d != 0), d, 0) for w, d in zip(weights, deltas, strict=True)
    )


CASES: dict[str, tuple[Recipe, Formula]] = {
    "sum_twice": (
        lambda x: m.sum_twice(*x[:3], alpha=0.3, beta=-0.4),
        lambda key, x: lerp(lerp(x[0], x[1], 0.3), x[2], -0.4),
    ),
    "triple_sum": (
        lambda x: m.triple_sum(*x[:3], alpha=0.3, beta=0.9),
        lambda key, x: -0.2 * x[0] + 0.3 * x[1] + 0.9 * x[2],
    ),
    "weighted_subtraction": (
        lambda x: m.weighted_subtraction(*x[:2], alpha=0.6, beta=0.8),
        lambda key, x: (x[0] - 0.48 * x[1]) / 0.52,
    ),
    "multiply_difference": (
        lambda x: m.multiply_difference(*x[:3], alpha=0.3, beta=0.8),
        lambda key, x: (
            x[2]
            + np.copysign(
                abs(x[0] - x[2]) ** 0.7 * abs(x[1] - x[2]) ** 0.3, lerp(x[0], x[1], 0.8) - x[2]
            )
        ),
    ),
    "similarity_add_difference": (
        lambda x: m.similarity_add_difference(*x[:3], alpha=0.7, beta=0.4),
        lambda key, x: similarity_add_difference(*x[:3], 0.7, 0.4),
    ),
    "euclidean_add_difference": (
        lambda x: m.euclidean_add_difference(*x[:3], alpha=0.3),
        lambda key, x: euclidean_add_difference(*x[:3], 0.3),
    ),
    "train_difference": (
        lambda x: m.train_difference(*x[:3], alpha=0.7),
        lambda key, x: train_difference(*x[:3], 0.7),
    ),
    "train_difference, strict": (
        lambda x: m.train_difference(*x[:3], alpha=0.7, filter="strict"),
        lambda key, x: strict_train_difference(*x[:3], 0.7),
    ),
    "smooth_add": (
        lambda x: m.smooth_add(*x[:3], alpha=0.7),
        lambda key, x: smooth_add(*x[:3], 0.7),
    ),
    "extract": (
        lambda x: m.extract(*x[:3], alpha=0.3, beta=0.2, gamma=0.6),
        lambda key, x: extract(*x[:3], 0.3, 0.2, 0.6),
    ),
    "distribution_crossover": (
        lambda x: m.distribution_crossover(*x[:3], alpha=0.37),
        lambda key, x: distribution_crossover(*x[:3], 0.37, 0),
    ),
    "distribution_crossover, tilted": (
        lambda x: m.distribution_crossover(*x[:3], alpha=0.37, tilt=0.6),
        lambda key, x: distribution_crossover(*x[:3], 0.37, 0.6),
    ),
    "median of 3": (lambda x: m.median(*x[:3]), lambda key, x: median(*x[:3])),
    "median of 4": (lambda x: m.median(*x), lambda key, x: median(*x)),
    "iso_c": (lambda x: m.iso_c(*x, scale=0.7), lambda key, x: iso_c(*x)),
    "iso_c of rows": (
        lambda x: m.iso_c(*x, scale=0.7, variant="rows"), lambda key, x: iso_c(*x, most_axes=4)
    ),
    "tsv_m": (lambda x: m.tsv_m(*x, scale=0.7), lambda key, x: tsv_m(*x)),
    "tsv_m of rows": (
        lambda x: m.tsv_m(*x, scale=0.7, variant="rows"), lambda key, x: tsv_m(*x, most_axes=4)
    ),
    "lines": (
        lambda x: m.lines(*x, alpha=0.2, beta=0.6, depth=DEPTHS, weights=[0.5, 1, -2]),
        lambda key, x: lines(DEPTHS[key], *x),
    ),
    "consensus": (
        lambda x: m.consensus(*x, least=2, threshold=0.6, scale=0.7),
        lambda key, x: consensus(*x, least=2, threshold=0.6),
    ),
    "consensus of all": (
        lambda x: m.consensus(*x, least=3, threshold=0.3, scale=0.7),
        lambda key, x: consensus(*x, least=3, threshold=0.3),
    ),
    "elected_task_arithmetic": (
        lambda x: m.elected_task_arithmetic(*x, density=0.4, weights=[0.5, 1, -2], scale=0.7),
        lambda key, x: elected(*x, density=0.4, weights=(0.5, 1, -2)),
    ),
    "elected_task_arithmetic of all": (
        lambda x: m.elected_task_arithmetic(*x, density=1.0, scale=0.7),
        lambda key, x: elected(*x, density=1.0, weights=(1, 1, 1)),
    ),
    "tall_mask": (
        lambda x: m.tall_mask(*x, task=1, threshold=0.6, scale=0.7),
        lambda key, x: tall_mask(*x, task=1, threshold=0.6),
    ),
}  # fmt: skip

"""Sums of models and of their differences."""

from collections.abc import Callable

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, RecipeError, Return, merge_method
from mecha_exp.extensions.merge_methods import is_constant, spread
from mecha_exp.methods.limiting import clamp
from mecha_exp.methods.parameters import (
    Alpha,
    Base,
    Delta,
    Experts,
    Model,
    Scale,
    Share,
    Small,
    Weight,
    Weights,
)
from mecha_exp.methods.reductions import norm

Factor = Parameter(Tensor, help="what all values are multiplied by")


@merge_method(elementwise=True, register=False)
def lerp(a: Model, b: Model, alpha: Small) -> Return(Tensor):
    """a + alpha (b - a), exact at both ends: the nearer one is what the other is blended into.

    As `torch.lerp`, which rounds differently at the end of a tile.
    """
    difference = b - a
    return torch.where(alpha.abs() < 0.5, a + alpha * difference, b - (1 - alpha) * difference)


@merge_method(elementwise=True, register=False)
def add_scaled(a: Model, d: Parameter(Tensor, ("weight", "delta")), alpha: Small) -> Return(Tensor):
    """a + alpha d."""
    return a + alpha * d


@merge_method(composite=True, title="Weighted sum", base="a")
def weighted_sum(a: Model, b: Model, alpha: Alpha = 0.5) -> Return(Tensor):
    """lerp(a, b, alpha) = (1 - alpha) a + alpha b.

    alpha 0 is a and reads nothing else, 1 is b; outside [0, 1] it extrapolates.
    """
    if is_constant(alpha, 0):
        return a
    if is_constant(alpha, 1):
        return b
    return lerp(a, b, alpha)


@merge_method(elementwise=True, title="Simple average")
def n_average(*models: Model) -> Return(Tensor):
    """The mean of the models: a uniform soup.

    Agrees: the paper's uniform soup, sd-mecha.
    Source: Model soups, Wortsman et al. 2022, arXiv:2203.05482.
    """
    total = models[0]
    for model in models[1:]:
        total = total + model
    return total / len(models)


@merge_method(elementwise=True, register=False)
def weighted_total(*deltas: Model, weights: Weights) -> Return(Tensor):
    """sum_i weights_i deltas_i."""
    total = deltas[0] * weights[0]
    for delta, weight in zip(deltas[1:], weights[1:], strict=True):
        total = total + delta * weight
    return total


@merge_method(elementwise=True, register=False)
def combination(*models: Model, coefficients: Small) -> Return(Tensor):
    """sum_i coefficients_i models_i, the coefficients being found in the data."""
    total = models[0] * coefficients[0]
    for index, model in enumerate(models[1:], 1):
        total = total + model * coefficients[index]
    return total


@merge_method(composite=True, title="Weighted average")
def linear(
    *models: Model,
    weights: Weights = 1.0,
    normalize: Parameter(bool, help="divide by the sum of the weights") = True,
) -> Return(Tensor):
    """sum_i weights_i models_i, divided by sum_i weights_i (`normalize`), which must not be 0 then.

    Agrees: mergekit.
    Source: Model soups, Wortsman et al. 2022, arXiv:2203.05482; as in mergekit.
    """
    each = spread(weights, len(models))
    total = sum(each) if normalize else 1.0
    if normalize and abs(total) <= 1e-12 * max(map(abs, each)):
        raise RecipeError(f"weights: {each} sum to zero. Change them, or set normalize=false.")
    return weighted_total(*models, weights=[weight / total for weight in each])


@merge_method(elementwise=True)
def subtract(a: Weight, b: Weight) -> Return(Tensor, "delta"):
    """a - b, the delta (task vector) that leads from b to a."""
    return a - b


@merge_method(elementwise=True, register=False)
def difference(a: Model, b: Model) -> Return(Tensor):
    """a - b, of models in any merge space."""
    return a - b


@merge_method(elementwise=True, register=False)
def plus(a: Model, d: Parameter(Tensor)) -> Return(Tensor):
    """a + d."""
    return a + d


@merge_method(elementwise=True)
def scale(a: Delta, alpha: Factor = 1.0) -> Return(Tensor, "delta"):
    """alpha a, of a delta."""
    return a * alpha


@merge_method(elementwise=True)
def passthrough(a: Model, scale: Factor = 1.0) -> Return(Tensor):
    """scale a.

    Source: mergekit.
    """
    return a * scale


@merge_method(composite=True, base="c")
def add_difference(
    a: Model,
    b: Experts,
    c: Base = None,
    alpha: Alpha = 1.0,
    clamp_to_ab: Parameter(bool, help="keep each value between those of a and b") = False,
) -> Return(Tensor):
    """a + alpha (b - c); without c, b is a delta: a + alpha b. alpha 0 is a and reads nothing else."""
    if is_constant(alpha, 0):
        return a
    added = add_scaled(a, b if c is None else subtract(b, c), alpha)
    if not clamp_to_ab:
        return added
    if a.merge_space != b.merge_space:
        raise RecipeError("clamp_to_ab: b is a delta, and the values of a cannot be held between it and a")
    return clamp(added, a, b)


def deltas_to(base: Node, models: tuple[Node, ...]) -> list[Node]:
    """The task vector of each model; a delta stays as it is."""
    return [subtract(model, base) if model.merge_space == "weight" else model for model in models]


def add_merged(
    base: Node, models: tuple[Node, ...], scale: Node, merge: Callable[[list[Node]], Node]
) -> Node:
    """base + scale merge(task vectors); the base alone, and nothing else read, where the scale is 0."""
    return base if is_constant(scale, 0) else add_scaled(base, merge(deltas_to(base, models)), scale)


@merge_method(composite=True)
def task_arithmetic(base: Base, *models: Experts, weights: Weights = 1.0, scale: Scale = 1.0) -> Return(
    Tensor, "weight"
):
    """base + scale sum_i weights_i (model_i - base).

    Agrees: the paper (weights=1), mergekit.
    Source: Task arithmetic, Ilharco et al. 2022, arXiv:2212.04089.
    """
    each = spread(weights, len(models))
    return add_merged(base, models, scale, lambda deltas: weighted_total(*deltas, weights=each))


@merge_method(composite=True)
def sum_twice(
    a: Model,
    b: Model,
    c: Model,
    alpha: Parameter(Tensor, help="how much of b in the first sum") = 0.5,
    beta: Parameter(Tensor, help="how much of c in the second sum") = 0.5,
) -> Return(Tensor):
    """lerp(lerp(a, b, alpha), c, beta).

    Source: supermerger.
    """
    return weighted_sum(weighted_sum(a, b, alpha=alpha), c, alpha=beta)


@merge_method(elementwise=True)
def triple_sum(
    a: Model,
    b: Model,
    c: Model,
    alpha: Parameter(Tensor, help="share of b") = 1 / 3,
    beta: Parameter(Tensor, help="share of c") = 1 / 3,
) -> Return(Tensor):
    """(1 - alpha - beta) a + alpha b + beta c.

    Source: supermerger.
    """
    return (1 - alpha - beta) * a + alpha * b + beta * c


@merge_method(composite=True, base="a")
def weighted_subtraction(
    a: Model,
    b: Model,
    alpha: Parameter(float, help="with beta the strength alpha beta of what is taken away") = 0.5,
    beta: Parameter(float, help="with alpha the strength alpha beta of what is taken away") = 0.5,
) -> Return(Tensor):
    """(a - alpha beta b) / (1 - alpha beta): what was merged with b to give a. alpha beta must not be 1.

    Source: s1dlx/meh.
    """
    if alpha * beta == 1:
        raise RecipeError("alpha, beta: alpha beta is 1, so nothing of a is left. Lower one of them.")
    return weighted_sum(a, b, alpha=-alpha * beta / (1 - alpha * beta))


@merge_method(elementwise=True, title="Multiply difference", base="c")
def multiply_difference(
    a: Weight,
    b: Weight,
    c: Base,
    alpha: Share = 0.5,
    beta: Parameter(float, help="which of a (0) and b (1) decides the signs") = 0.5,
) -> Return(Tensor, "weight"):
    """c + sign(lerp(a, b, beta) - c) |a - c|^(1 - alpha) |b - c|^alpha: a geometric mean of the differences.

    Source: s1dlx/meh.
    """
    size = (a - c).abs() ** (1 - alpha) * (b - c).abs() ** alpha
    return c + torch.copysign(size, a + beta * (b - a) - c)


@merge_method(elementwise=True, base="c")
def similarity_add_difference(
    a: Weight,
    b: Weight,
    c: Base,
    alpha: Alpha = 1.0,
    beta: Parameter(Tensor, help="how much of the weighted sum where a and b are alike") = 1.0,
) -> Return(Tensor, "weight"):
    """(1 - s) (a + alpha (b - c)) + s lerp(a, b, alpha / 2), with s the likeness of the entries of a and b.

    s = beta (a b / max(|a|, |b|)^2 + 1) / 2, and beta where both are 0.
    Source: s1dlx/meh.
    """
    larger = torch.where(a.abs() < b.abs(), b, a).square()
    likeness = torch.where(larger > 0, a * b / larger, 1)
    s = beta * (likeness + 1) / 2
    return (1 - s) * (a + alpha * (b - c)) + s * (a + alpha / 2 * (b - a))


@merge_method(elementwise=True, register=False)
def sum_from(a: Weight, b: Weight, c: Base, alpha: Small) -> Return(Tensor, "delta"):
    """lerp(a, b, alpha) - c."""
    return (1 - alpha) * (a - c) + alpha * (b - c)


@merge_method(elementwise=True, register=False)
def mean_square(a: Delta, b: Delta, alpha: Small, norm_a: Small, norm_b: Small, like: Delta) -> Return(
    Tensor, "delta"
):
    """sqrt((1 - alpha) (a / |a|)^2 + alpha (b / |b|)^2) with the signs of `like`; 0 / 0 counts as 0."""
    first = torch.where(norm_a > 0, (a / norm_a).square(), 0)
    second = torch.where(norm_b > 0, (b / norm_b).square(), 0)
    return torch.copysign(((1 - alpha) * first + alpha * second).sqrt(), like)


@merge_method(elementwise=True, register=False)
def of_length(d: Delta, norm: Small, length: Small) -> Return(Tensor, "delta"):
    """d made as long as `length`; zeros where d is zero."""
    return torch.where(norm > 0, d * (length / norm), 0)


@merge_method(composite=True, title="Euclidean add difference", base="c")
def euclidean_add_difference(a: Weight, b: Weight, c: Base, alpha: Share = 0.5) -> Return(Tensor, "weight"):
    """c + D |S| / |D|, where S = lerp(a, b, alpha) - c gives the signs and the norm over the whole tensor.

    D = sqrt((1 - alpha) (da / |da|)^2 + alpha (db / |db|)^2), entry by entry, da = a - c and db = b - c.
    Source: s1dlx/meh.
    """
    da, db = subtract(a, c), subtract(b, c)
    target = sum_from(a, b, c, alpha)
    direction = mean_square(da, db, alpha, norm(da), norm(db), target)
    return add_scaled(c, of_length(direction, norm(direction), norm(target)), 1.0)

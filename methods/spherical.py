"""Interpolation on the sphere."""

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method
from mecha_exp.extensions.merge_methods import is_constant, spread
from mecha_exp.methods.linear import add_scaled, combination, subtract, weighted_sum
from mecha_exp.methods.parameters import Base, Model, Small, Weights
from mecha_exp.methods.reductions import (
    column_cosines,
    column_products,
    dot,
    gram,
    gram_matrix,
    norm,
    slice_size,
)

SMALLEST_SINE = 1e-7
"""Below it the two directions are parallel, or opposite, and no arc between them is defined."""

Part = Parameter(Tensor, help="part of the way from a (0) to b (1), any number")


@merge_method(elementwise=True, register=False)
def slerp_weight(norm_self: Small, norm_other: Small, product: Small, share: Small) -> Return(
    Tensor, "param"
):
    """The factor of one tensor in slerp, for its `share` of the way, from 0 to 1."""
    omega = torch.arccos((product / (norm_self * norm_other)).clamp(-1, 1))
    sine, length = torch.sin(omega), norm_other + share * (norm_self - norm_other)
    weight = torch.sin(share * omega) / sine * length / norm_self
    return torch.where(sine > SMALLEST_SINE, weight, share)


@merge_method(elementwise=True, register=False)
def arc_weight(
    norm_a: Small, norm_b: Small, product: Small, share: Small, threshold: Parameter(float)
) -> Return(Tensor, "param"):
    """sin(share omega) / sin(omega), or `share` where the cosine is beyond the threshold or undefined."""
    cosine = (product / (norm_a * norm_b)).clamp(-1, 1)
    omega = torch.arccos(cosine)
    sine = torch.sin(omega)
    weight = torch.sin(share * omega) / sine
    return torch.where((cosine.abs() <= threshold) & (sine > SMALLEST_SINE), weight, share)


@merge_method(elementwise=True, register=False)
def complement(alpha: Small) -> Return(Tensor, "param"):
    """1 - alpha."""
    return 1 - alpha


@merge_method(elementwise=True, register=False)
def combine(a: Model, weight_a: Small, b: Model, weight_b: Small) -> Return(Tensor):
    """weight_a a + weight_b b."""
    return a * weight_a + b * weight_b


@merge_method(composite=True, title="SLERP")
def slerp(a: Model, b: Model, alpha: Part = 0.5) -> Return(Tensor):
    """Spherical interpolation: the direction along the arc from a to b, the norm linearly.

    With omega the angle between a and b as vectors, and ^ for a unit vector:
    (sin((1 - alpha) omega) ^a + sin(alpha omega) ^b) / sin(omega) * ((1 - alpha) |a| + alpha |b|).
    Where no arc is defined (parallel, opposite or zero tensors) it is the weighted sum. alpha 0 is a, 1 is b.
    Source: Shoemake 1985; sd-mecha.
    """
    if is_constant(alpha, 0) or is_constant(alpha, 1):
        return weighted_sum(a, b, alpha=alpha)
    norm_a, norm_b, product = norm(a), norm(b), dot(a, b)
    weight_a = slerp_weight(norm_a, norm_b, product, complement(alpha))
    weight_b = slerp_weight(norm_b, norm_a, product, alpha)
    return combine(a, weight_a, b, weight_b)


@merge_method(composite=True, title="SLERP (raw weights)")
def slerp_raw(
    a: Model,
    b: Model,
    alpha: Part = 0.5,
    threshold: Parameter(float, ge=0, le=1, help="a larger |cosine| makes it the weighted sum") = 0.9995,
) -> Return(Tensor):
    """(sin((1 - alpha) omega) a + sin(alpha omega) b) / sin(omega), omega the angle between a and b.

    The weighted sum where the cosine of a and b is beyond the threshold. alpha 0 is a, 1 is b.
    Source: mergekit, where it is called slerp.
    """
    if is_constant(alpha, 0) or is_constant(alpha, 1):
        return weighted_sum(a, b, alpha=alpha)
    known = norm(a), norm(b), dot(a, b)
    weight_a = arc_weight(*known, complement(alpha), threshold=threshold)
    return combine(a, weight_a, b, arc_weight(*known, alpha, threshold=threshold))


def _arc(a: Tensor, b: Tensor, cosine: Tensor, alpha: float | Tensor) -> Tensor:
    """`slerp_raw` of slices of which the cosine is known; the weighted sum where it is not a number."""
    omega = torch.arccos(cosine.clamp(-1, 1))
    arc = (torch.sin((1 - alpha) * omega) * a + torch.sin(alpha * omega) * b) / torch.sin(omega)
    return torch.where(torch.sin(omega) > SMALLEST_SINE, arc, (1 - alpha) * a + alpha * b)


@merge_method(rowwise=True, register=False)
def arc_of_rows(a: Model, b: Model, alpha: Parameter(float)) -> Return(Tensor):
    """The arc of each slice along the last axis."""
    norms = a.norm(dim=-1, keepdim=True) * b.norm(dim=-1, keepdim=True)
    return _arc(a, b, (a * b).sum(-1, keepdim=True) / norms, alpha)


@merge_method(rowwise=slice_size, register=False)
def arc_of_columns(a: Model, b: Model, cosines: Small, alpha: Parameter(float)) -> Return(Tensor):
    """The arc of each slice along the first axis."""
    return _arc(a, b, cosines, alpha)


@merge_method(composite=True, title="NuSLERP")
def nuslerp(
    a: Model,
    b: Model,
    base: Base = None,
    weight_a: Parameter(float, help="of a") = 1.0,
    weight_b: Parameter(float, help="of b") = 1.0,
    flatten: Parameter(bool, help="one arc for the whole tensor, not one for each slice") = True,
    row_wise: Parameter(bool, help="without flatten: slices along the first axis, not the last") = False,
) -> Return(Tensor):
    """`slerp_raw` at alpha = weight_b / (weight_a + weight_b); of deltas if there is a base.

    There is no threshold, and alpha is 0.5 where the weights sum to 0.
    Source: mergekit.
    """
    total = weight_a + weight_b
    alpha = weight_b / total if abs(total) > 1e-6 * max(abs(weight_a), abs(weight_b)) else 0.5
    if base is not None:
        a, b = subtract(a, base), subtract(b, base)
    if flatten:
        merged = slerp_raw(a, b, alpha=alpha, threshold=1.0)
    elif row_wise:
        merged = arc_of_columns(a, b, column_cosines(column_products(a, b)), alpha=alpha)
    else:
        merged = arc_of_rows(a, b, alpha=alpha)
    return merged if base is None else add_scaled(base, merged, 1.0)


@merge_method(elementwise=True, register=False)
def mean_direction(products: Small, weights: Parameter(list[float]), eps: Parameter(float)) -> Return(
    Tensor, "param"
):
    """The coefficients of `multislerp`, from the inner products of its models."""
    shares = torch.tensor(weights, dtype=products.dtype)
    matrix = gram_matrix(products, len(weights))
    norms = matrix.diagonal().sqrt()
    unit = torch.where(norms > 0, shares / (norms + eps), 0)
    length = (unit @ matrix @ unit).clamp_min(0).sqrt()
    if length < max(eps, SMALLEST_SINE):
        return shares
    return unit / length * (shares * norms).sum()


@merge_method(composite=True, title="Multi-SLERP")
def multislerp(
    *models: Model,
    weights: Weights = 1.0,
    normalize_weights: Parameter(bool, help="divide the weights by their sum") = True,
    eps: Parameter(float, ge=0, help="added to norms; mergekit has 1e-8") = 0.0,
    base: Base = None,
) -> Return(Tensor):
    """m / |m| * sum_i w_i |x_i|, with m = sum_i w_i x_i / |x_i|: the mean direction with the mean norm.

    x_i are the models, or their deltas if there is a base. mergekit adds the mean of the tangents at m, which
    is 0 at that very point. Where the directions cancel each other out it is the weighted sum; mergekit
    refuses that for more than two models.
    Agrees: mergekit (eps=1e-8, which is added to |x_i|).
    Source: multi-SLERP in mergekit, Goddard 2025.
    """
    if base is not None:
        models = tuple(subtract(model, base) for model in models)
    each = spread(weights, len(models))
    if normalize_weights:
        each = spread([weight / (sum(each) or 1.0) for weight in each], len(models))
    if len(models) == 1:
        merged = models[0]
    else:
        coefficients = mean_direction(gram(*models), weights=each, eps=eps)
        merged = combination(*models, coefficients=coefficients)
    return merged if base is None else add_scaled(base, merged, 1.0)


@merge_method(elementwise=True, register=False)
def sphere_mean(
    products: Small,
    count: Parameter(int),
    max_iter: Parameter(int),
    tol: Parameter(float),
    zero_below: Parameter(float),
) -> Return(Tensor, "param"):
    """The coefficients of `karcher`: the mean stays in the span of the models, so N numbers suffice."""
    matrix = gram_matrix(products, count)
    norms = matrix.diagonal().sqrt()
    share = (norms > zero_below).to(norms)
    if not share.any():
        return torch.zeros_like(norms)
    share = share / share.sum()
    lengths = torch.where(share > 0, norms, torch.inf)
    cosines = matrix / lengths / lengths.unsqueeze(1)

    def length(of: Tensor) -> Tensor:
        return (of @ cosines @ of).clamp_min(0).sqrt()

    start = share if length(share) > tol else torch.nn.functional.one_hot(share.argmax(), count).to(share)
    mean = start / length(start)
    for _ in range(max_iter):
        towards = (cosines @ mean).clamp(-1, 1)
        angle = torch.arccos(towards)
        defined = (angle >= tol) & (torch.sin(angle) > SMALLEST_SINE)
        pull = torch.where(defined, share * angle / torch.sin(angle), 0)
        tangent = pull - (pull * towards).sum() * mean
        step = length(tangent)
        if step < tol:
            break
        mean = torch.cos(step) * mean + torch.sin(step) / step * tangent
        mean = mean / length(mean)
    return mean / lengths * norms.mean()


@merge_method(composite=True, title="Karcher mean")
def karcher(
    *models: Model,
    max_iter: Parameter(int, ge=0, help="steps at most") = 10,
    tol: Parameter(float, gt=0, help="angles and steps below it count as 0") = 1e-5,
    zero_below: Parameter(float, ge=0, help="models of a norm up to it count as 0; mergekit has tol") = 0.0,
) -> Return(Tensor):
    """The Riemannian (Karcher) mean of the directions on the sphere, times the mean of the norms.

    The point from which the logarithms of all directions sum to zero, found by gradient steps. It lies in the
    span of the models, so only their inner products are needed: the tensors are read twice in all.
    Agrees: mergekit (zero_below=tol, by which tensors of small norm are lost).
    Source: Karcher 1977; mergekit.
    """
    if len(models) == 1:
        return models[0]
    coefficients = sphere_mean(
        gram(*models), count=len(models), max_iter=max_iter, tol=tol, zero_below=zero_below
    )
    return combination(*models, coefficients=coefficients)

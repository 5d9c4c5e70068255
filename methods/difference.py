"""Parts of the difference between models, and masks for where to add it."""

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mecha_exp import Parameter, Return, merge_method
from mecha_exp.extensions.merge_methods import RunLoop, is_constant
from mecha_exp.methods.linear import add_difference, add_scaled, subtract, weighted_sum
from mecha_exp.methods.parameters import Alpha, Base, Model, Share, Small, Weight
from mecha_exp.methods.reductions import column_cosines, column_products, dot, slice_size, squared_norm
from mecha_exp.methods.smoothing import smoothed


@merge_method(elementwise=True, register=False)
def quotient(a: Model, b: Model) -> Return(Tensor):
    """a / b."""
    return a / b


@merge_method(elementwise=True, register=False)
def without_share(b: Model, a: Model, share: Small) -> Return(Tensor):
    """b - share a; zeros where the share is not a number."""
    return torch.where(share == share, b - a * share, 0)


@merge_method(composite=True)
def perpendicular_component(a: Model, b: Model) -> Return(Tensor):
    """What of b is at right angles to a, over the whole tensor: b - a <a, b> / |a|^2; zeros where a is zero.

    Source: sd-mecha.
    """
    return without_share(b, a, quotient(dot(a, b), squared_norm(a)))


@merge_method(composite=True, title="Add perpendicular", base="c")
def add_perpendicular(a: Weight, b: Weight, c: Base, alpha: Alpha = 1.0) -> Return(Tensor, "weight"):
    """a + alpha d, d being what of b - c is at right angles to a - c.

    Source: sd-mecha.
    """
    if is_constant(alpha, 0):
        return a
    return add_scaled(a, perpendicular_component(subtract(a, c), subtract(b, c)), alpha)


def _quotient_or_zero(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0, a / b)


MaskSize = Parameter(Tensor, help="what the mask is multiplied by, any number")


@merge_method(elementwise=True)
def train_difference_mask(a: Weight, b: Weight, c: Base, alpha: MaskSize = 1.0) -> Return(Tensor, "param"):
    """1.8 alpha |b - a| / (|b - a| + |b - c|), entry by entry, and 0 for 0 / 0.

    Source: supermerger; sd-mecha.
    """
    distance = (b - a).abs()
    return 1.8 * alpha * _quotient_or_zero(distance, distance + (b - c).abs())


@merge_method(elementwise=True)
def add_opposite_mask(a: Weight, b: Weight, c: Base, alpha: MaskSize = 1.0) -> Return(Tensor, "param"):
    """2 alpha |a - b| / (|a - b| + |a + b - 2 c|), entry by entry, and 0 for 0 / 0: where a and b go apart.

    Source: sd-mecha.
    """
    distance = (a - b).abs()
    return 2 * alpha * _quotient_or_zero(distance, distance + (a + b - 2 * c).abs())


@merge_method(elementwise=True)
def add_strict_opposite_mask(a: Weight, b: Weight, c: Base, alpha: MaskSize = 1.0) -> Return(Tensor, "param"):
    """2 alpha max(0, (c - a) (b - c) / max(|a - c|, |b - c|)^2), and 0 for 0 / 0: only where signs differ.

    Source: sd-mecha.
    """
    da, db = a - c, b - c
    larger = torch.where(da.abs() < db.abs(), db, da)
    return 2 * alpha * _quotient_or_zero(-da * db, larger.square()).clamp_min(0)


@merge_method(elementwise=True, register=False)
def half(a: Model) -> Return(Tensor):
    """a / 2."""
    return a * 0.5


@merge_method(composite=True, title="Train difference", base="c")
def train_difference(
    a: Weight,
    b: Weight,
    c: Base,
    alpha: Alpha = 1.0,
    filter: Parameter(
        str, choices=("distance", "strict"), help="add more where b is far from a, or only where signs differ"
    ) = "distance",
) -> Return(Tensor, "weight"):
    """a + mask (b - c): b's training from c, added to a as if a had been trained so.

    The mask is `train_difference_mask` (distance), or half of `add_strict_opposite_mask` (strict).
    Source: supermerger, hako-mikan.
    """
    if is_constant(alpha, 0):
        return a
    if filter == "distance":
        mask = train_difference_mask(a, b, c, alpha=alpha)
    else:
        mask = half(add_strict_opposite_mask(a, b, c, alpha=alpha))
    return add_scaled(a, subtract(b, c), mask)


@merge_method(elementwise=True, register=False)
def geometric_mean(a: Model, b: Model, alpha: Small) -> Return(Tensor):
    """|a|^(1 - alpha) |b|^alpha cos(pi ((1 - alpha) [a < 0] + alpha [b < 0]))."""
    turn = (1 - alpha) * (a < 0) + alpha * (b < 0)
    return a.abs() ** (1 - alpha) * b.abs() ** alpha * torch.cos(math.pi * turn)


@merge_method(composite=True, title="Geometric sum")
def geometric_sum(a: Model, b: Model, alpha: Alpha = 0.5) -> Return(Tensor):
    """Re(a^(1 - alpha) b^alpha), in complex numbers, entry by entry. alpha 0 is a, 1 is b.

    Source: sd-mecha.
    """
    if is_constant(alpha, 0) or is_constant(alpha, 1):
        return weighted_sum(a, b, alpha=alpha)
    return geometric_mean(a, b, alpha)


@merge_method(elementwise=True, title="Multiply quotient", base="c")
def multiply_quotient(a: Weight, b: Weight, c: Base, alpha: Alpha = 1.0) -> Return(Tensor, "weight"):
    """Re(a (b / c)^(alpha m)), m = max(0, -La Lb / max(|La|, |Lb|)^2), Lx = log|x / c|; a where undefined.

    As adding a difference, but of magnitudes: a is multiplied where b has grown and a has shrunk, or so.
    Source: sd-mecha.
    """
    la, lb = a.abs().log() - c.abs().log(), b.abs().log() - c.abs().log()
    larger = torch.where(la.abs() < lb.abs(), lb, la).square()
    opposite = torch.nan_to_num(-la * lb / larger, nan=0).clamp_min(0)
    power = alpha * opposite
    ratio = b / c
    result = a * ratio.abs() ** power * torch.cos(math.pi * power * (ratio < 0))
    return torch.where(result.isfinite(), result, a)


@merge_method(elementwise=True, register=False)
def cosine_with_overall(columns: Small, products: Small) -> Return(Tensor, "param"):
    """The mean of the cosine of each column and that of the whole tensors, one with zeros counting as 0."""
    overall = products[2].sum() / (products[0].sum() * products[1].sum()).sqrt()
    return (columns.nan_to_num(nan=0) + overall.nan_to_num(nan=0)) / 2


Likeness = Parameter(
    Tensor, help="the larger, the more of b: columns no more alike than alpha are those of b"
)


@cache
def _blending(dtype: torch.dtype) -> RunLoop:
    """The loop of `blended_columns`: a and b, with the share of b at each entry."""
    lines = ("d = x1 - x0", "y = x0 + x2 * d if x2 < {t}(0.5) else x1 - ({t}(1) - x2) * d")
    return RunLoop(lines, 3, ["y"], dtype)


@merge_method(rowwise=slice_size, register=False)
def blended_columns(a: Weight, b: Weight, likeness: Small, alpha: Small) -> Return(Tensor, "weight"):
    """lerp(a, b, 1 - clamp(likeness - alpha, 0, 1)), column by column; no likeness counts as 0."""
    k = 1 - (likeness.nan_to_num(nan=0) - alpha).clamp(0, 1)
    if type(a) is Tensor:  # and not one that is being recorded
        merged = torch.empty_like(a)
        if _blending(a.dtype)((a, b, k.expand_as(a).contiguous()), (merged,)):
            return merged
    return torch.where(k < 0.5, a + k * (b - a), b - (1 - k) * (b - a))


@merge_method(composite=True)
def add_cosine_a(a: Weight, b: Weight, alpha: Likeness = 1.0) -> Return(Tensor, "weight"):
    """lerp(a, b, k), k = 1 - clamp(s - alpha, 0, 1), s the cosine of the columns (along axis 0) of a and b.

    A cosine with zeros counts as 0.
    Agrees: sd-mecha.
    Differs: supermerger's cosineA scales the likenesses to the range that they have in the whole model.
    Source: sd-mecha, after supermerger's cosineA.
    """
    return blended_columns(a, b, column_cosines(column_products(a, b)), alpha)


@merge_method(composite=True)
def add_cosine_b(a: Weight, b: Weight, alpha: Likeness = 1.0) -> Return(Tensor, "weight"):
    """As `add_cosine_a`, s being the mean of the column's cosine and that of the whole tensors.

    A cosine with zeros counts as 0.
    Agrees: sd-mecha.
    Differs: supermerger's cosineB scales the likenesses to the range that they have in the whole model.
    Source: sd-mecha, after supermerger's cosineB.
    """
    products = column_products(a, b)
    return blended_columns(a, b, cosine_with_overall(column_cosines(products), products), alpha)


@merge_method(rowwise=True, title="Extract", base="a")
def extract(
    a: Base,
    b: Weight,
    c: Weight,
    alpha: Share = 0.5,
    beta: Parameter(
        float, ge=0, le=1, help="0 takes what b and c have in common, 1 what they have not"
    ) = 0.0,
    gamma: Parameter(float, ge=0, help="how sharply likeness counts") = 0.3,
) -> Return(Tensor, "weight"):
    """a + lerp(b - a, c - a, alpha) lerp(d, 1 - d, beta), d = ((cos(b - a, c - a) + 1) / 2)^gamma, by row.

    A row is a slice along the last axis; a cosine with zeros counts as 0.
    Source: supermerger.
    """
    db, dc = b - a, c - a
    nothing = torch.finfo(db.dtype).tiny  # torch takes norms below 1e-8 for that
    cosine = cosine_similarity(db, dc, dim=-1, eps=nothing).clamp(-1, 1).unsqueeze(-1)
    d = ((cosine + 1) / 2) ** gamma
    return a + (db + alpha * (dc - db)) * (d + beta * (1 - 2 * d))


@merge_method(composite=True, title="Smooth add", base="c")
def smooth_add(a: Weight, b: Weight, c: Base, alpha: Alpha = 1.0) -> Return(Tensor, "weight"):
    """a + alpha gaussian(median(b - c)): a difference without its outliers, over all axes of the tensor.

    The median of 3 neighbours along each axis, then a Gaussian of sigma 1. Whole tensors.
    Source: supermerger.
    """
    if is_constant(alpha, 0):
        return a
    return add_difference(a, smoothed(subtract(b, c)), alpha=alpha)

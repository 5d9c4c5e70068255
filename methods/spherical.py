"""Interpolation on the sphere."""

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method
from mecha_exp.method import is_constant
from mecha_exp.methods.linear import weighted_sum
from mecha_exp.methods.reductions import dot, norm

SMALLEST_SINE = 1e-7
"""Below it the two directions are parallel, or opposite, and no arc between them is defined."""


@merge_method(elementwise=True, register=False)
def slerp_weight(
    norm_self: Parameter(Tensor, "param"),
    norm_other: Parameter(Tensor, "param"),
    product: Parameter(Tensor, "param"),
    share: Parameter(Tensor, "param"),
) -> Return(Tensor, "param"):
    """What slerp multiplies one of its tensors by, `share` being its part of the way: 1 is all of it."""
    omega = torch.arccos((product / (norm_self * norm_other)).clamp(-1, 1))
    length = norm_other + share * (norm_self - norm_other)
    weight = torch.sin(share * omega) / torch.sin(omega) * length / norm_self
    return torch.where(torch.sin(omega) > SMALLEST_SINE, weight, share)


@merge_method(elementwise=True, register=False)
def complement(alpha: Parameter(Tensor, "param")) -> Return(Tensor, "param"):
    """1 - alpha."""
    return 1 - alpha


@merge_method(elementwise=True, register=False)
def combine(
    a: Parameter(Tensor),
    weight_a: Parameter(Tensor, "param"),
    b: Parameter(Tensor),
    weight_b: Parameter(Tensor, "param"),
) -> Return(Tensor):
    """weight_a a + weight_b b."""
    return a * weight_a + b * weight_b


@merge_method(composite=True)
def slerp(a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(Tensor) = 0.5) -> Return(Tensor):
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

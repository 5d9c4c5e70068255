"""What a difference between models is made of."""

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method
from mecha_exp.methods.reductions import dot, squared_norm


@merge_method(elementwise=True, register=False)
def quotient(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):
    """a / b."""
    return a / b


@merge_method(elementwise=True, register=False)
def without_share(b: Parameter(Tensor), a: Parameter(Tensor), share: Parameter(Tensor, "param")) -> Return(
    Tensor
):
    """b - share a; zeros where the share is not a number."""
    return torch.where(share == share, b - a * share, 0)


@merge_method(composite=True)
def perpendicular_component(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):
    """What of b is at right angles to a, over the whole tensor: b - a <a, b> / |a|^2; zeros where a is zero.

    Source: sd-mecha.
    """
    return without_share(b, a, quotient(dot(a, b), squared_norm(a)))

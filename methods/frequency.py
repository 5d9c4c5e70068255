"""Merging by frequency: what is smooth in a tensor from one model, what is fine from another."""

import math

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, factor, merge_method
from mecha_exp.methods.linear import weighted_sum
from mecha_exp.methods.parameters import Model, Share, Small, Weight
from mecha_exp.methods.slicing import ascending

Tilt = Parameter(float, help="slope of the filter: 0 is a sharp cut, 1 a weighted sum; it has the period 4")


def distances(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """How far each place of a spectrum is from frequency 0: the root of the mean square over axes, 0 to 1."""
    axes = []
    for axis, size in enumerate(shape):
        if axis == len(shape) - 1:
            axes.append(torch.arange(size).to(like) / max(size - 1, 1))
        else:  # the second half are the negative frequencies
            places = torch.arange(size)
            axes.append(torch.minimum(places, size - places).to(like) / max(size // 2, 1))
    squares = [axis.square() for axis in axes]
    return (sum(torch.meshgrid(*squares, indexing="ij")) / len(shape)).sqrt()


def high_pass(shape: tuple[int, ...], alpha: float, tilt: float, like: Tensor) -> Tensor:
    """The share of b at each place of a spectrum: a step or a slope over the distance from frequency 0.

    The step is at 1 - alpha. `tilt` turns it, in quarter turns, and slides it until it touches (alpha, 1 -
    alpha).
    """
    tilt = tilt % 4
    return 1 - _cut(shape, 1 - alpha, tilt - 2, like) if tilt > 2 else _cut(shape, alpha, tilt, like)


def _cut(shape: tuple[int, ...], alpha: float, tilt: float, like: Tensor) -> Tensor:
    mesh = distances(shape, like)
    if tilt < 1e-10:
        return (mesh > 1 - alpha).to(like)
    if abs(tilt - 2) < 1e-10:
        return (mesh < 1 - alpha).to(like)
    slope = 1 / math.tan(math.pi * tilt / 2)
    level = alpha + slope * (alpha - 1) if tilt <= 1 else alpha - slope * alpha
    return (mesh * slope + level).clamp(0, 1)


def _blend(a: Tensor, b: Tensor, alpha: float, tilt: float, like: Tensor) -> Tensor:
    return a + high_pass(tuple(a.shape), alpha, tilt, like) * (b - a)


@factor(elements=lambda shape: 2 * math.prod(shape))
def spectrum(a: Model) -> Return(Tensor, "param"):
    """The real Fourier transform over all axes; a number is its own."""
    return torch.fft.rfftn(a) if a.ndim else a


@merge_method(register=False)
def cross(a: Model, low: Small, high: Small, alpha: Parameter(float), tilt: Parameter(float)) -> Return(
    Tensor
):
    """The tensor with the low frequencies of a spectrum and the high ones of another; numbers are blended."""
    if not a.ndim:
        return a + alpha * (high - a)
    return torch.fft.irfftn(_blend(low, high, alpha, tilt, a), s=a.shape)


@merge_method(composite=True)
def crossover(a: Model, b: Model, alpha: Share = 0.5, tilt: Tilt = 0.0) -> Return(Tensor):
    """The low frequencies of a and the high ones of b, in the real Fourier transform over all axes.

    The filter is the same in all directions: b where the distance from frequency 0 exceeds 1 - alpha, of 1 at
    most. `tilt` makes the step a slope, until at 1 it is the weighted sum. alpha 0 is a, 1 is b. Needs whole
    tensors.
    Source: sd-mecha.
    """
    if alpha in (0, 1) or tilt == 1:
        return weighted_sum(a, b, alpha=alpha)
    return cross(a, spectrum(a), spectrum(b), alpha=alpha, tilt=tilt)


@merge_method(register=False)
def cross_in_order(
    a: Model, b: Model, order: Small, alpha: Parameter(float), tilt: Parameter(float)
) -> Return(Tensor):
    """The crossover of the entries of a and b in an order, as if they were samples in time."""
    low, high = (torch.fft.rfft(x.flatten()[order]) for x in (a, b))
    crossed = torch.fft.irfft(_blend(low, high, alpha, tilt, a), n=a.numel())
    back = torch.empty_like(crossed)
    back[order] = crossed
    return back.reshape(a.shape)


@merge_method(composite=True)
def distribution_crossover(a: Weight, b: Weight, c: Weight, alpha: Share = 0.5, tilt: Tilt = 0.0) -> Return(
    Tensor, "weight"
):
    """`crossover` of a and b in the ascending order of c, and back: alpha is the share of b.

    Of equal entries of c the earlier comes first. Needs whole tensors.
    Source: sd-mecha.
    """
    if alpha in (0, 1) or tilt == 1:
        return weighted_sum(a, b, alpha=alpha)
    return cross_in_order(a, b, ascending(c), alpha=alpha, tilt=tilt)

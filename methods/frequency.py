"""Merging by frequency: the smooth part of a tensor from one model, the fine part from another."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, factor, merge_method
from mecha_exp.methods.linear import add_merged, difference, plus, weighted_sum, weighted_total
from mecha_exp.methods.parameters import Base, Delta, Experts, Model, Scale, Share, Small, Weight
from mecha_exp.methods.slicing import PART, put_in_order, ranks_of_all

MOST_BY_MATRIX = 64
"""Entries of the axes behind the first two, up to which a matrix transforms them."""

Tilt = Parameter(float, help="slope of the filter: 0 is a sharp cut, 1 a weighted sum; it has the period 4")


def spectrum_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the real Fourier transform of a tensor."""
    return (*shape[:-1], shape[-1] // 2 + 1)


def squared_distances(shape: tuple[int, ...], like: Tensor) -> list[Tensor]:
    """The squared distance of a spectrum's entries from frequency 0 along each axis, from 0 to 1."""
    axes = []
    for axis, size in enumerate(shape):
        if axis == len(shape) - 1:
            distances = torch.arange(size).to(like) / max(size - 1, 1)
        else:  # the second half are the negative frequencies
            places = torch.arange(size)
            distances = torch.minimum(places, size - places).to(like) / max(size // 2, 1)
        axes.append(distances.square())
    return axes


def high_pass(distance: Tensor, alpha: float, tilt: float) -> Tensor:
    """The share of b at a distance from frequency 0, from 0 to 1: a step or a slope.

    The step is at 1 - alpha. `tilt` turns it, in quarter turns, and slides it until it touches (alpha, 1 -
    alpha).
    """
    tilt = tilt % 4
    return 1 - _cut(distance, 1 - alpha, tilt - 2) if tilt > 2 else _cut(distance, alpha, tilt)


def _cut(distance: Tensor, alpha: float, tilt: float) -> Tensor:
    if tilt < 1e-10:
        return (distance > 1 - alpha).to(distance)
    if abs(tilt - 2) < 1e-10:
        return (distance < 1 - alpha).to(distance)
    slope = 1 / math.tan(math.pi * tilt / 2)
    level = alpha + slope * (alpha - 1) if tilt <= 1 else alpha - slope * alpha
    return (distance * slope + level).clamp(0, 1)


def parts(whole: Tensor, axis: int) -> list[slice]:
    """Where the parts of a tensor along an axis lie: whole copies would take much memory."""
    size = max(1, PART * whole.shape[axis] // whole.numel())
    return [slice(start, start + size) for start in range(0, whole.shape[axis], size)]


def filtered(waves: Tensor, squares: Sequence[Tensor], alpha: float, tilt: float) -> Tensor:
    """A part of a spectrum times `high_pass`.

    The distance from frequency 0 is the root of the mean of `squared_distances` over all axes.
    """
    first, *others = squares
    distance = (sum(others, first) / len(squares)).sqrt()
    return waves * high_pass(distance, alpha, tilt)


def inner_waves(a: Tensor) -> Tensor:
    """The real Fourier transform over the axes behind the first two: [waves, rows, columns].

    Kernels are small: a product with a matrix transforms them in a fraction of the time of an FFT.
    """
    inner = a.shape[2:]
    size, axes = math.prod(inner), tuple(range(1, len(inner) + 1))
    entries = a.reshape(-1, *inner)
    waves = a.new_empty(math.prod(spectrum_shape(inner)), len(entries), dtype=a.dtype.to_complex())
    units = torch.eye(size, dtype=torch.float64).reshape(size, *inner) if size <= MOST_BY_MATRIX else None
    matrix = None if units is None else torch.view_as_real(torch.fft.rfftn(units, dim=axes)).flatten(1).to(a)
    for part in parts(entries, 0):
        if matrix is None:
            made = torch.fft.rfftn(entries[part], dim=axes).flatten(1)
        else:
            made = torch.view_as_complex((entries[part].flatten(1) @ matrix).unflatten(1, (-1, 2)))
        waves[:, part] = made.mT
    return waves.unflatten(1, a.shape[:2])


def inner_entries(waves: Tensor, inner: tuple[int, ...]) -> Tensor:
    """The tensor with `inner_waves`; `inner` is its shape behind the first two axes."""
    size, axes = math.prod(inner), tuple(range(1, len(inner) + 1))
    waves, shape = waves.flatten(1), waves.shape[1:]
    entries = waves.real.new_empty(waves.shape[1], size)
    matrix = None
    if size <= MOST_BY_MATRIX:
        units = torch.view_as_complex(torch.eye(2 * len(waves), dtype=torch.float64).unflatten(1, (-1, 2)))
        units = units.unflatten(1, spectrum_shape(inner))
        matrix = torch.fft.irfftn(units, s=inner, dim=axes).flatten(1).to(entries)
    for part in parts(entries, 0):
        gathered = waves[:, part].mT.contiguous()
        if matrix is None:
            spectra = gathered.unflatten(1, spectrum_shape(inner))
            entries[part] = torch.fft.irfftn(spectra, s=inner, dim=axes).flatten(1)
        else:
            torch.mm(torch.view_as_real(gathered).flatten(1), matrix, out=entries[part])
    return entries.reshape(*shape, *inner)


@factor(elements=lambda shape: 2 * math.prod(spectrum_shape(shape)) if shape else 1)
def spectrum(a: Model) -> Return(Tensor, "param"):
    """The real Fourier transform over all axes; a number is its own.

    Of more than two axes it is made of planes, [waves, rows, columns]: one for each wave of the axes behind
    the first two.
    """
    if a.ndim < 3:
        return torch.fft.rfftn(a) if a.ndim else a
    planes = inner_waves(a)
    for plane in planes:
        plane.copy_(torch.fft.fft2(plane))
    return planes


@merge_method(register=False)
def high_frequencies(d: Model, waves: Small, alpha: Parameter(float), tilt: Parameter(float)) -> Return(
    Tensor
):
    """The high frequencies of a tensor with a spectrum; of a number the share alpha."""
    if not d.ndim:
        return alpha * d
    first, *others = squared_distances(spectrum_shape(tuple(d.shape)), waves.real)
    if d.ndim == 1:
        return torch.fft.irfft(filtered(waves, [first], alpha, tilt), n=len(d))
    second, *inner = others
    high = torch.empty_like(waves)
    for plane, passed_on, squares in zip(
        *(w.reshape(-1, *w.shape[-2:]) for w in (waves, high)), itertools.product(*inner), strict=True
    ):
        for part in parts(plane, 0):
            passed_on[part] = filtered(plane[part], [first[part, None], second, *squares], alpha, tilt)
        if inner:
            passed_on.copy_(torch.fft.ifft2(passed_on))
    return inner_entries(high, tuple(d.shape[2:])) if inner else torch.fft.irfft2(high, s=d.shape)


@merge_method(composite=True, title="Crossover")
def crossover(a: Model, b: Model, alpha: Share = 0.5, tilt: Tilt = 0.0) -> Return(Tensor):
    """The low frequencies of a and the high ones of b, in the real Fourier transform over all axes.

    The filter is the same in all directions: b where the distance from frequency 0 exceeds 1 - alpha, of 1 at
    most. `tilt` makes the step a slope, until at 1 it is the weighted sum. alpha 0 is a, 1 is b. Needs whole
    tensors.
    Source: sd-mecha.
    """
    if alpha in (0, 1) or tilt == 1:
        return weighted_sum(a, b, alpha=alpha)
    apart = difference(b, a)
    return plus(a, high_frequencies(apart, spectrum(apart), alpha=alpha, tilt=tilt))


@merge_method(register=False)
def high_frequencies_in_order(
    d: Model, order: Small, alpha: Parameter(float), tilt: Parameter(float)
) -> Return(Tensor):
    """The high frequencies of the entries in an order, as if they were samples in time."""
    waves = torch.fft.rfft(put_in_order(d.flatten(), order))
    distance = torch.arange(len(waves)).to(d) / max(len(waves) - 1, 1)
    high = torch.fft.irfft(waves * high_pass(distance, alpha, tilt), n=d.numel())
    return high.index_select(0, order).reshape(d.shape)


@merge_method(composite=True, title="Distribution crossover", base="c")
def distribution_crossover(a: Weight, b: Weight, c: Weight, alpha: Share = 0.5, tilt: Tilt = 0.0) -> Return(
    Tensor, "weight"
):
    """`crossover` of a and b in the ascending order of c, and back: alpha is the share of b.

    Of equal entries of c the earlier comes first. Needs whole tensors.
    Source: sd-mecha.
    """
    if alpha in (0, 1) or tilt == 1:
        return weighted_sum(a, b, alpha=alpha)
    high = high_frequencies_in_order(difference(b, a), ranks_of_all(c), alpha=alpha, tilt=tilt)
    return plus(a, high)


def passed(shape: tuple[int, int], radius: float, is_official: bool, like: Tensor) -> Tensor:
    """How often each frequency of a matrix passes the filter of FR-Merging: once or not at all.

    In the order of torch's fft2 the highest frequencies lie in the middle. In the official code those at a
    distance of just floor(min(shape) / 10) from there are in two of its bands, and those nearer to it pass at
    any radius.
    """
    rows, columns = (torch.arange(size).to(like) - size // 2 for size in shape)
    distance = (rows.square()[:, None] + columns.square()).sqrt()
    inside = distance <= min(shape) * radius
    if not is_official:
        return inside.to(like)
    inner = min(shape) // 10
    return (distance <= inner).to(like) + ((distance >= inner) & inside)


@merge_method(register=False)
def without_low_frequencies(total: Delta, radius: Parameter(float), variant: Parameter(str)) -> Return(
    Tensor, "delta"
):
    """A matrix without its low frequencies; other tensors as they are. See `fr_merging`."""
    if total.ndim != 2:
        return total.clone()
    waves = torch.fft.fft2(total)
    waves *= passed(tuple(total.shape), radius, variant == "official", total)
    return torch.fft.ifft2(waves).real.clone(memory_format=torch.contiguous_format)


@merge_method(composite=True, title="FR-Merging")
def fr_merging(
    base: Base,
    *models: Experts,
    radius: Parameter(
        float, ge=0, help="of the high frequencies that are kept, in parts of the smaller side of the matrix"
    ) = 0.6,
    variant: Parameter(
        str,
        choices=("paper", "official"),
        help="whether each frequency counts once, or as in the authors' code",
    ) = "paper",
    scale: Scale = 0.3,
) -> Return(Tensor, "weight"):
    """base + scale sum_i high(model_i - base), high(d) being a matrix without its low frequencies.

    Tasks interfere most in what is smooth. In the two-dimensional Fourier transform of H rows and W columns
    those frequencies are kept that lie within radius min(H, W) of the highest one, (H // 2, W // 2). Other
    tensors are added as they are. Needs whole tensors; the filter is linear, so there is one transform.
    Variants: paper: each frequency counts once. official: those at a distance of just floor(min(H, W) / 10)
    count twice, since two bands of the authors' code have them, and those nearer are kept at any radius.
    Agrees: the official code (variant=official), by the formula of its merge_vit.
    Differs: the official code filters the matrices of attention and MLPs of ViTs only; see keys. Its merge_lm
    has one function with the larger side in place of the smaller one.
    Source: FR-Merging, Zheng & Wang 2024, arXiv:2411.16815.
    """

    def merge(deltas: list[Node]) -> Node:
        total = weighted_total(*deltas, weights=[1.0] * len(deltas))
        return without_low_frequencies(total, radius=radius, variant=variant)

    return add_merged(base, models, scale, merge)

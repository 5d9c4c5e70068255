"""Reductions: sums, norms, products and order statistics of tensors and whole models, tile by tile."""

import math
from fractions import Fraction

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, merge_method, reduction, whole_model
from mecha_exp.extensions.merge_methods import products_of_columns
from mecha_exp.methods.parameters import Kept, Model, Small


@reduction(sums=True)
def dot(a: Model, b: Model) -> Return(Tensor, "param"):
    """The inner product <a, b> over the whole tensor, accumulated in float64."""
    return a.double() * b.double()


@reduction(sums=True)
def squared_norm(a: Model) -> Return(Tensor, "param"):
    """|a|^2 over the whole tensor, accumulated in float64."""
    return a.double().square()


@reduction(sums=True, register=False)
def sum_of_magnitudes(a: Model) -> Return(Tensor, "param"):
    """The L1 norm, accumulated in float64."""
    return a.double().abs()


@reduction(sums=True)
def gram(*models: Model) -> Return(Tensor, "param"):
    """All inner products <model_i, model_j> with i <= j, row by row, in one pass; see `gram_matrix`."""
    wide = [model.double() for model in models]
    return tuple(a * b for i, a in enumerate(wide) for b in wide[i:])


def gram_matrix(products: Tensor, count: int) -> Tensor:
    """The symmetric matrix of inner products, [count, count], from what `gram` gives."""
    full = products.new_zeros(count, count)
    row, column = torch.triu_indices(count, count)
    full[row, column] = products.reshape(-1)
    full[column, row] = products.reshape(-1)
    return full


def slice_size(shape: tuple[int, ...]) -> int:
    """The entries of a slice along the first axis: how many columns there are to go down."""
    return math.prod(shape[1:])


@reduction(rowwise=slice_size, register=False)
def column_products(a: Model, b: Model) -> Return(Tensor, "param"):
    """|a|^2, |b|^2 and <a, b> of each column (along the first axis), [3, columns], in float64."""
    return products_of_columns(a, b)


@merge_method(elementwise=True, register=False)
def column_cosines(products: Small) -> Return(Tensor, "param"):
    """The cosine of each column, from `column_products`; not a number where a column is zero."""
    return products[2] / (products[0] * products[1]).sqrt()


@merge_method(elementwise=True, register=False)
def square_root(a: Model) -> Return(Tensor):
    """The entry-wise square root."""
    return a.sqrt()


@merge_method(composite=True)
def norm(a: Model) -> Return(Tensor, "param"):
    """The Euclidean norm |a| over the whole tensor."""
    root: Node = square_root(squared_norm(a))
    return root


model_dot = whole_model(dot, register=True)
model_squared_norm = whole_model(squared_norm, register=True)


@merge_method(composite=True)
def model_norm(a: Model) -> Return(Tensor, "param"):
    """The Euclidean norm |a| over all keys of the model."""
    root: Node = square_root(model_squared_norm(a))
    return root


@reduction(sums=True, finish=lambda total, count, **_: total / count, register=False)
def mean(a: Model) -> Return(Tensor, "param"):
    """The mean of the entries, accumulated in float64."""
    return a.double()


model_mean = whole_model(mean, register=True)


@reduction(rank=lambda count, k: max(int((1 - k) * count), 1))
def kth_magnitude(a: Model, k: Kept) -> Return(Tensor, "param"):
    """The magnitude t that the largest `k` of the entries reach: abs(a) >= t keeps about k n of them.

    t is the order statistic of abs(a) at the ascending index max(int((1 - k) n), 1), exactly, as in sd-mecha.
    """
    return a.abs()


model_kth_magnitude = whole_model(kth_magnitude, register=True)


def whole_share(share: float, count: int) -> int:
    """floor(share count), exactly: 0.29 of 100 is 29, where `int(0.29 * 100)` is 28.

    A share that is the nearest float to a fraction of small terms (0.29, 1 / 3) stands for that fraction.
    """
    near = Fraction(share).limit_denominator(10**6)
    return int((near if float(near) == share else Fraction(share)) * count)


def _rank_of_least_kept(count: int, density: float, variant: str) -> int:
    if variant == "sd-mecha":
        return max(int((1 - density) * count), 1)
    if variant == "official":
        return max(count - int(density * count), 1)
    if density == 0:
        return count + 1
    kept = whole_share(density, count) if variant == "paper" else int(density * count)
    return count + 1 - max(kept, 1)


def _rank_of_largest_dropped(count: int, density: float, variant: str) -> int:
    return _rank_of_least_kept(count, density, variant) - 1 or count + 1


@reduction(rank=_rank_of_least_kept, register=False)
def least_kept(a: Model, density: Parameter(float), variant: Parameter(str)) -> Return(Tensor, "param"):
    """The smallest of the density n largest magnitudes; infinity where none is kept.

    variant paper counts floor(density n) exactly, and mergekit in floats, both at least one unless density is
    0; official counts one more than mergekit, and sd-mecha as `kth_magnitude`.
    """
    return a.abs()


model_least_kept = whole_model(least_kept)


@reduction(rank=_rank_of_largest_dropped, register=False)
def largest_dropped(a: Model, density: Parameter(float), variant: Parameter(str)) -> Return(Tensor, "param"):
    """The largest magnitude below those that `least_kept` counts; infinity where nothing is dropped."""
    return a.abs()


model_largest_dropped = whole_model(largest_dropped)


@reduction(rank=lambda count, density: count + 1 - int(density * count), register=False)
def least_chosen(a: Model, density: Parameter(float)) -> Return(Tensor, "param"):
    """The smallest of the int(density n) largest magnitudes among the n that are not 0."""
    return torch.where(a == 0, torch.nan, a.abs())


@reduction(rank=lambda count, part: int(part * (count - 1)) + 1, register=False)
def quantile(a: Model, part: Parameter(float)) -> Return(Tensor, "param"):
    """The magnitude at the ascending index int(part (n - 1)), counted from 0."""
    return a.abs()

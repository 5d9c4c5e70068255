"""Networks whose units are matched by what they do on data: Git Re-Basin by activations, and ZipIt.

`python -m mecha_exp calibrate kind=activations` writes what the units of each model give on the same
examples. The model config names the units (`symmetries`). Tensors that share units are made together.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mecha_exp import MergeError, Parameter, Return, StateDict, merge_method
from mecha_exp.architectures import OUTPUTS, Symmetry
from mecha_exp.methods.symmetries import (
    Tensors,
    assigned,
    in_groups,
    permuted,
    read_group,
    units_at,
    with_units,
)

Activations = Parameter(
    StateDict[Tensor], "param", help="activations of each model on the same examples, from calibrate"
)
EPS = 1e-7
"""The smallest product of two standard deviations that a covariance is divided by, as in ZipIt's code."""


@merge_method(statistics="activations")
class rebasin_by_activations:
    """a with its hidden units in the order in which they do most alike those of ref: argmax_P <Z_ref, P Z_a>.

    Z are the activations of a layer's units on the same examples, [units, examples]; each layer is a linear
    assignment problem by itself, in float64. a computes what it did. `likeness=correlation` centres each
    unit's activations and divides them by their size. Units are seen where a layer reads them, behind their
    activation function; queries and keys, which no layer reads, where they are made. Units without
    activations stay where they are, and so do heads. The statistics are those of a, then of ref.

    Agrees: the official code, whose products are not centred; its correlations are an option there, too.
    Source: Git Re-Basin, activation matching (Ainsworth et al. 2022, arXiv:2209.04836).
    """

    map_keys = staticmethod(in_groups)

    def __call__(
        self,
        a: Parameter(StateDict[Tensor]),
        ref: Parameter(StateDict[Tensor]),
        statistics: Activations,
        likeness: Parameter(
            str, choices=("product", "correlation"), help="of two units' activations"
        ) = "product",
        **kwargs: Any,
    ) -> Return(Tensor):
        tensors, group = read_group(a, kwargs)
        orders = {}
        for symmetry in group:
            units = activations_of(symmetry, statistics)
            if units is not None:
                given, wanted = standardised(units) if likeness == "correlation" else units
                orders[symmetry] = assigned(wanted @ given.mT)
        return permuted(tensors, orders)


@merge_method(statistics="activations")
class zipit:
    """The mean of models whose units are merged in pairs by correlation, also pairs within one model.

    In each layer of n units the N n units of N models become n. The pair whose activations correlate most
    is merged, again and again; a merged unit correlates with another as alpha times the least that its
    parts do. At most beta (N - 1) n / N pairs within a model are merged. Units that became one have the mean
    of their incoming weights, and each model's layer that reads them receives the one in place of all:
    W = mean_i N M_i W_i U_i, M the means and U the copies. Correlations are in float64.

    Other tensors are the mean of the models, and so are queries and keys, which meet in a product: units
    merged within a model would count twice there. All layers that the model config names are zipped; heads of
    several tasks behind a common trunk, the paper's partial zip, would be another network and are not made.
    Units of different heads are not merged. Memory: about 25 (N n)^2 bytes.

    Agrees: the official code, match_tensors_zipit, with its alpha and beta.
    Differs: the official code divides by the number of units + 1e-5, merges a pair within each model where
    beta allows none, and merges a unit with itself where no pair is left, which is an error here.
    Source: ZipIt, Stoica et al. 2023, arXiv:2305.03053.
    """

    map_keys = staticmethod(partial(in_groups, models="models"))

    def __call__(
        self,
        *models: Parameter(StateDict[Tensor], "weight"),
        statistics: Activations,
        alpha: Parameter(float, gt=0, le=1, help="what a merged unit's correlations are multiplied by") = 0.3,
        beta: Parameter(float, ge=0, le=1, help="the share of merges that may be within models") = 0.125,
        **kwargs: Any,
    ) -> Return(Tensor, "weight"):
        each = [read_group(model, kwargs) for model in models]
        made, group = each[0]
        if made[kwargs["key"]].is_meta:
            return made
        zips = {}
        for symmetry in group:
            units = None if has_no_reader(symmetry) else activations_of(symmetry, statistics)
            if units is not None:
                zips[symmetry] = zipped(symmetry, units, alpha, beta)
        total = [merged(tensors, zips, number) for number, (tensors, _) in enumerate(each)]
        return {key: sum(tensors[key] for tensors in total) / len(models) for key in made}


def has_no_reader(symmetry: Symmetry) -> bool:
    """Whether no layer reads the units: they are queries and keys."""
    return all(name.endswith(OUTPUTS) for name, _ in symmetry.activations)


def activations_of(symmetry: Symmetry, statistics: StateDict[Tensor]) -> Tensor | None:
    """The activations of the units of each model: float64 [models, heads, width, rows].

    Those at several layers are beside each other. None where there are none.
    """
    size = symmetry.heads * symmetry.width
    seen = [
        torch.stack([part[name][:, start : start + size].double().mT for part in statistics.parts])
        for name, start in symmetry.activations
        if name in statistics
    ]
    return torch.cat(seen, -1).unflatten(1, (symmetry.heads, symmetry.width)) if seen else None


def standardised(units: Tensor) -> Tensor:
    """Activations less their mean, of length 1; of a unit that always gives the same, zeros."""
    centred = units - units.mean(-1, keepdim=True)
    length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    return centred / torch.where(length > 0, length, 1)


def zipped(symmetry: Symmetry, units: Tensor, alpha: float, beta: float) -> Tensor:
    """Which units become one: zeros and ones [models, heads, width, merged], in float64."""
    models, heads, width, _ = units.shape
    zips = torch.zeros(models, heads, width, width, dtype=torch.float64)
    for head in range(heads):
        likeness = correlations(units[:, head].flatten(0, 1))
        joined = pairs_merged(likeness, models, alpha, beta)
        if joined is None:
            raise MergeError(
                f"no two units of '{symmetry.keys[0]}' may be merged any more, since pairs within the "
                "models are used up. Raise beta, or merge two models at a time."
            )
        _, place = joined.unique(return_inverse=True)
        zips[:, head] = torch.nn.functional.one_hot(place, width).double().view(models, width, width)
    return zips


def correlations(units: Tensor) -> Tensor:
    """The correlation of each unit's activations with those of each other: [units, units]."""
    centred = units - units.mean(-1, keepdim=True)
    made = centred @ centred.mT / units.shape[-1]
    size = made.diagonal().sqrt()
    return made.div_(torch.outer(size, size).clamp_min_(EPS))


def pairs_merged(likeness: Tensor, models: int, alpha: float, beta: float) -> Tensor | None:
    """Merge the pair of units that are most alike, until there are as many as one model has.

    Args:
        likeness: of the units of all models, [models * width, models * width]; it is used up.

    Returns:
        for each unit the first of those that it is one with, int64; None where no pair may be merged.
    """
    count = len(likeness)
    width = count // models
    first = torch.arange(count)
    model = first // width
    budget = [int((count - width) // models * beta + 1e-4)] * models
    likeness.fill_diagonal_(-torch.inf)
    for number in range(models if not budget[0] else 0):
        _forbid(likeness, model == number)
    best, partner = likeness.max(1)
    for _ in range(count - width):
        one = int(best.argmax())
        if best[one] == -torch.inf:
            return None
        kept, gone = sorted((one, int(partner[one])))
        first[first == gone] = kept
        row = alpha * torch.minimum(likeness[kept], likeness[gone])
        likeness[kept], likeness[:, kept] = row, row
        likeness[gone], likeness[:, gone] = -torch.inf, -torch.inf
        stale = (partner == kept) | (partner == gone) | ((row >= best) & (row > -torch.inf))
        stale[[kept, gone]] = True
        owner = int(model[kept])
        if owner == int(model[gone]):
            budget[owner] -= 1
            if budget[owner] <= 0:
                _forbid(likeness, model == owner)
                stale |= model == owner
        model[gone] = models  # of no model any more
        best[stale], partner[stale] = likeness[stale].max(1)
    return first


def _forbid(likeness: Tensor, units: Tensor) -> None:
    """Let no two of these units be merged."""
    likeness[units.unsqueeze(1) & units] = -torch.inf


def merged(tensors: Tensors, zips: dict[Symmetry, Tensor], number: int) -> Tensors:
    """The tensors of one model with merged units: N M_i W_i U_i, whose mean over the models is the result."""
    made = dict(tensors)
    for symmetry, joined in zips.items():
        copies = joined[number].mT
        means = copies * len(joined) / joined.sum((0, 2)).unsqueeze(-1)
        for place in symmetry.places:
            units = units_at(made[place.key], place, symmetry)
            matrix = (copies if place.axis else means).to(units)
            made[place.key] = with_units(made[place.key], place, matrix @ units)
    return made

"""Merging with data: each model counts where statistics on its data say that it matters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mecha_exp import (
    MergeError,
    Node,
    Parameter,
    RecipeError,
    Return,
    StateDict,
    factor,
    merge_method,
    skip_key,
)
from mecha_exp.extensions.merge_methods import StatisticsSource, counted, spread
from mecha_exp.methods.linear import add_merged, weighted_total
from mecha_exp.methods.parameters import Base, Delta, Experts, Scale, Small, Weight, Weights
from mecha_exp.methods.reductions import model_norm

INPUTS_FIRST = " (inputs first)"
"""The end of the key of a Gram matrix whose weight has the inputs on its first axis, as GPT-2's do."""

Statistics = Parameter(Tensor, "param", help="of each model on its data, from files that calibrate wrote")


@factor(elements=lambda shape, *, files: len(files), register=True, reads=StatisticsSource)
def statistics(
    *files: Parameter(
        Tensor,
        help="of each model, in the order of the models: python -m mecha_exp calibrate MODEL data=FILE "
        "kind=KIND output=FILE.safetensors",
    ),
    kind: Parameter(
        str,
        choices=("fisher", "gram", "mean", "norm", "gradient", "activations", "mask"),
        help="which of the statistics in the files",
    ),
) -> Return(Tensor, "param"):
    """One kind of statistics of several models, from files that `calibrate` wrote: for methods with data.

    Not a model by itself.
    """
    return torch.stack(files)


def _of_each(node: Node, kind: str, models: int) -> list[Node]:
    """The statistics of each model."""
    call = dict(getattr(node, "arguments", ()))
    files = call.get("files", ())
    given = getattr(call.get("kind"), "value", None)
    if given != kind or len(files) != models:
        raise RecipeError(
            f"statistics: expected statistics(..., kind={kind}) of {counted(models, 'model')}, got {node!r}"
        )
    return list(files)


@merge_method(elementwise=True, register=False)
def by_information(
    *models_and_information: Parameter(Tensor),
    weights: Weights,
    floor: Parameter(float),
    floored: Parameter(int),
    norms: Small = 1.0,
) -> Return(Tensor, "weight"):
    """sum_i s_i model_i / sum_i s_i, s_i = w_i max(F_i, floor) / norm_i, or w_i where no F_i is above 0.

    The first half of the tensors are the models, the second half their F_i. The floor is that of the first
    `floored` models.
    """
    count = len(models_and_information) // 2
    models, information = models_and_information[:count], models_and_information[count:]
    scaled = [
        (size.clamp_min(floor) if index < floored else size) * weights[index] / norms[index]
        for index, size in enumerate(information)
    ]
    total = sum(size * model for size, model in zip(scaled, models, strict=True))
    mean = sum(weight * model for weight, model in zip(weights, models, strict=True)) / sum(weights)
    known = (sum(information) > 0) & (sum(scaled) > 0)
    return torch.where(known, total / sum(scaled), mean)


@merge_method(elementwise=True, register=False)
def above_zero(*norms: Small) -> Return(Tensor, "param"):
    """Numbers as one vector; 0 counts as 1."""
    return torch.stack([torch.where(norm > 0, norm, 1) for norm in norms])


@merge_method(composite=True, statistics="fisher", title="Fisher")
def fisher(
    *models: Weight,
    statistics: Statistics,
    weights: Weights = 1.0,
    normalize: Parameter(
        bool, help="divide each model's information by its norm over the whole model"
    ) = True,
    floor: Parameter(float, ge=0, help="information below it counts as it") = 1e-6,
    favour_first: Parameter(bool, help="the floor is that of the first model alone, the target") = False,
) -> Return(Tensor, "weight"):
    """sum_i w_i F_i model_i / sum_i w_i F_i, F_i the diagonal Fisher information of model i on its data.

    An entry counts as much as the outputs depend on it. Information is divided by its norm over all keys,
    found in one more trip over the data. Entries of which no model has any get sum_i w_i model_i / sum_i w_i,
    and so does what was not measured.
    Agrees: the official code, with favour_first=true; its plain formula has normalize=false and floor=0.
    Differs: the official code searches for the weights, and knows no entries without information.
    Source: Fisher merging, Matena & Raffel 2021, arXiv:2111.09832.
    """
    information = _of_each(statistics, "fisher", len(models))
    each = spread(weights, len(models))
    if min(each) < 0 or not any(each):
        raise RecipeError(f"weights: {each} must be 0 or more, and not all 0.")
    given = {"weights": each, "floor": floor}
    given["floored"] = 1 if favour_first else len(models)
    ones = list(map(model_norm, information)) if normalize else [1.0] * len(models)
    return by_information(*models, *information, norms=above_zero(*ones), **given)


Floor = Parameter(float, gt=0, help="what is added to all information")


@merge_method(elementwise=True, register=False)
def informed(delta: Delta, information: Weight, scale: Parameter(float), floor: Floor) -> Return(
    Tensor, "delta"
):
    """(F + floor) (scale delta), F the information of the scaled model."""
    return (information + floor) * (scale * delta)


@merge_method(elementwise=True, register=False)
def per_information(total: Delta, *information: Weight, floor: Floor) -> Return(Tensor, "delta"):
    """N total / sum_i (F_i + floor) for N models."""
    return len(information) * total / sum(size + floor for size in information)


@merge_method(composite=True, statistics="fisher", measured="scaled")
def df_merge(
    base: Base,
    *models: Experts,
    statistics: Statistics,
    scales: Parameter(
        list[float], help="what each task vector is multiplied by: one for all, or a list"
    ) = 0.3,
    floor: Floor = 1e-12,
) -> Return(Tensor, "weight"):
    """base + N sum_i F_i c_i d_i / sum_i F_i, F_i the diagonal Fisher information of base + c_i d_i.

    d_i are the N task vectors, c_i their scales. The information is that of the scaled models, so it is
    measured anew for other scales, on the data of each expert's task: recipe=df_merge does it. The paper
    searches for scales in [0, 1] by Bayesian optimisation: sweep=search. What was not measured gets task
    arithmetic.
    Agrees: the official code.
    Source: DF-Merge, Lee et al. 2025, arXiv:2504.18992.
    """
    information = _of_each(statistics, "fisher", len(models))
    each = spread(scales, len(models))

    def merge(deltas: list[Node]) -> Node:
        terms = [
            informed(delta, size, scale=scale, floor=floor)
            for delta, size, scale in zip(deltas, information, each, strict=True)
        ]
        total = weighted_total(*terms, weights=[1.0] * len(terms))
        return per_information(total, *information, floor=floor)

    return add_merged(base, models, 1.0, merge)


@merge_method(elementwise=True, register=False)
def masked(delta: Delta, mask: Weight) -> Return(Tensor, "delta"):
    """The delta where the mask is 1; 0 elsewhere."""
    return torch.where(mask > 0, delta, 0)


@merge_method(elementwise=True, register=False)
def per_mask(total: Delta, *masks: Weight) -> Return(Tensor, "delta"):
    """The total over how many masks are 1 at the entry; 0 where none is."""
    count = sum(masks)
    return torch.where(count > 0, total / count, 0)


@merge_method(composite=True, statistics="mask", title="Stitch")
def stitch(base: Base, *models: Experts, statistics: Statistics, scale: Scale = 1.0) -> Return(
    Tensor, "weight"
):
    """base + scale d, of each entry the mean of the d_i whose trained masks have it, and 0 where none has.

    Localize-and-Stitch with data: calibrate kind=mask finds the entries of a task vector that the expert
    needs for its task. `localize_and_stitch` takes the largest ones without data.
    Agrees: the official code, whose masks are those of calibrate with variant=official. It trains none for
    embeddings, the last norm and the projection of the text, which stay the base's there.
    Source: Localize-and-Stitch, He et al. 2024, arXiv:2408.13656.
    """
    masks = _of_each(statistics, "mask", len(models))

    def merge(deltas: list[Node]) -> Node:
        chosen = [masked(delta, mask) for delta, mask in zip(deltas, masks, strict=True)]
        return per_mask(weighted_total(*chosen, weights=[1.0] * len(chosen)), *masks)

    return add_merged(base, models, scale, merge)


def solved_layer(models: list[Tensor], grams: Sequence[StateDict[Tensor]], name: str, alpha: float) -> Tensor:
    """sum_i model_i G_i (sum_i G_i)^-1 by Cholesky in float64, for matrices of rows by inputs.

    G_i is what `grams[i]` has under the name, its off-diagonal entries multiplied by alpha. One of them is in
    memory at a time, and the system is solved where it is. Inputs that are 0 in all data say nothing of their
    columns, which get the mean of the models.

    Raises:
        MergeError: a matrix is not one of products, or the sum is singular all the same.
    """
    rows, inputs = models[0].flatten(1).shape
    total = torch.zeros(inputs, inputs, dtype=torch.float64)
    right = torch.zeros(rows, inputs, dtype=torch.float64)
    for model, of_model in zip(models, grams, strict=True):
        add_products(total, right, model.flatten(1), of_model[name], alpha, name)
    seen = total.diagonal() > 0
    total.diagonal().masked_fill_(~seen, 1)  # such an input is alone in its row and column
    divide(right, total, int(seen.sum()), name)
    made = right.to(models[0].dtype)
    if not bool(seen.all()):
        made = torch.where(seen, made, (sum(models) / len(models)).flatten(1))
    return made.reshape(models[0].shape)


def add_products(
    total: Tensor, right: Tensor, weights: Tensor, gram: Tensor, alpha: float, name: str
) -> None:
    """Add a Gram matrix, damped by alpha, to `total`, and its product with the weights to `right`."""
    if bool((gram.diagonal() < 0).any()):
        raise MergeError(f"a Gram matrix of '{key_of(name)}' has a square below 0. Calibrate again.")
    for start in range(0, len(gram), ROWS):  # a whole matrix in float64 is as large as the sum
        rows = slice(start, start + ROWS)
        damped = gram[rows].to(torch.float64, copy=True).mul_(alpha)
        damped.diagonal(start).copy_(gram.diagonal()[rows])
        total[rows] += damped
        right.addmm_(weights[:, rows].double(), damped)


def divide(right: Tensor, total: Tensor, seen: int, name: str) -> None:
    """Replace right by right total^-1, and total by its Cholesky factor; `seen` inputs are of the data."""
    size = total.diagonal().sqrt()
    for scaled in (total, right, total.mT):  # to inputs of one size, in place
        scaled /= size
    factor = total.mT  # with columns one after another, as LAPACK takes it without a copy
    _, failed = torch.linalg.cholesky_ex(factor, out=(factor, torch.empty((), dtype=torch.int32)))
    if int(failed) or least_eigenvalue(factor) < SINGULAR * seen**0.5:
        raise MergeError(
            f"the Gram matrices of '{key_of(name)}' are singular in sum, so its inputs do not tell the "
            "weights. Calibrate with more examples than the layer has inputs, or set alpha below 1."
        )
    torch.linalg.solve_triangular(factor.mT, right, upper=True, left=False, out=right)
    torch.linalg.solve_triangular(factor, right, upper=False, left=False, out=right)
    right /= size


ROWS = 512
"""How many rows of a Gram matrix are in float64 at a time."""

SINGULAR = torch.finfo(torch.float32).eps
"""Times the root of their count, what errors of this size in entries move the eigenvalues of a matrix by."""


def least_eigenvalue(factor: Tensor) -> float:
    """The least eigenvalue of the matrix of a Cholesky factor, nearly and from above: inverse iteration."""
    vector = torch.randn(len(factor), 1, generator=torch.Generator().manual_seed(0)).to(factor)
    for _ in range(4):
        vector = torch.linalg.solve_triangular(factor, vector / vector.norm(), upper=False)
        vector = torch.linalg.solve_triangular(factor.mT, vector, upper=True)
    return 1 / float(vector.norm())


def key_of(name: str) -> str:
    """The key of the model that a Gram matrix is of."""
    return name.removesuffix(INPUTS_FIRST)


def mean_of(models: tuple[StateDict[Tensor], ...], key: str) -> Tensor:
    """The mean of the models; of variances of batch norms the pooled one, mean(v) + mean((m - mean(m))^2)."""
    before, dot, name = key.rpartition(".")
    partner = f"{before}{dot}running_mean"
    if name != "running_var" or any(partner not in model for model in models):
        return mean_at(models, key)
    centre = mean_at(models, partner)
    apart = sum((model[partner] - centre).square() for model in models) / len(models)
    return mean_at(models, key) + apart


def mean_at(models: tuple[StateDict[Tensor], ...], key: str) -> Tensor:
    """The mean of the models at a key, one of which is in memory at a time."""
    total = models[0][key].clone()
    for model in models[1:]:
        total += model[key]
    return total / len(models)


Grams = Parameter(
    StateDict[Tensor], "param", help="of each model on its data, from files that calibrate wrote"
)
Damping = Parameter(
    float, ge=0, le=1, help="what the off-diagonal entries of Gram matrices are multiplied by"
)
Models = Parameter(StateDict[Tensor], "weight")


def by_grams(
    models: tuple[StateDict[Tensor], ...], statistics: StateDict[Tensor], alpha: float, key: str
) -> Tensor:
    """The layer at a key that RegMean finds by the Gram matrices there, or the mean where there are none."""
    if key.endswith(INPUTS_FIRST):
        skip_key(key)  # no key of a model, but of a Gram matrix
    turned = key + INPUTS_FIRST in statistics
    if not turned and key not in statistics:
        return mean_of(models, key)
    tensors, name = [model[key] for model in models], key + INPUTS_FIRST * turned
    if tensors[0].is_meta and [part[name] for part in statistics.parts]:
        return tensors[0]  # a dry run, which counts what is read
    if turned:
        tensors = [tensor.mT for tensor in tensors]
    made = solved_layer(tensors, statistics.parts, name, alpha)
    return made.mT.contiguous() if turned else made


@merge_method(statistics="gram", title="RegMean")
def regmean(*models: Models, statistics: Grams, alpha: Damping = 0.9, **kwargs: object) -> Return(
    Tensor, "weight"
):
    """sum_i model_i G_i (sum_i G_i)^-1 for layers with Gram matrices G_i of their inputs; else the mean.

    The layer whose outputs are nearest to those of each model on its own data, in least squares. alpha damps
    the entries of G_i beside the diagonal. Convolutions are matrices of filters by patches. Inputs that are 0
    in all data leave the mean in their columns. Solved key by key in float64: memory is that of one layer.
    Agrees: the official code, whose alpha is regmean_reduce_nondiag.
    Source: RegMean, Jin et al. 2022, arXiv:2212.09849.
    """
    return by_grams(models, statistics, alpha, str(kwargs["key"]))


@merge_method(statistics="gram", measured="along_merge")
def regmean_plus_plus(*models: Models, statistics: Grams, alpha: Damping = 0.9, **kwargs: object) -> Return(
    Tensor, "weight"
):
    """`regmean` by Gram matrices of the inputs that each model's blocks receive from the merged ones before.

    They belong to the merge, and to its alpha: recipe=regmean_plus_plus measures them, block by block.
    Agrees: the official code (reduce_non_diagonal_ratio=alpha), which leaves what lies behind the last block
    as it is in the base; here it is the mean.
    Source: RegMean++, Nguyen et al. 2025, arXiv:2508.03121.
    """
    return by_grams(models, statistics, alpha, str(kwargs["key"]))

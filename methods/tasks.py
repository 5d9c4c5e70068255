"""Task vectors by entry and by depth: which entries matter to which task, and where in the network."""

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, RecipeError, Return, merge_method
from mecha_exp.extensions.merge_methods import counted, is_constant, spread
from mecha_exp.methods.linear import add_merged, add_scaled, combination, deltas_to, task_arithmetic
from mecha_exp.methods.outliers import shares
from mecha_exp.methods.parameters import (
    Base,
    Delta,
    Experts,
    KeptShares,
    Scale,
    Small,
    Task,
    Weights,
    check_task,
)
from mecha_exp.methods.reductions import model_least_kept, model_squared_norm
from mecha_exp.methods.ties import TIES, keep_largest, model_surplus_of_signs

Threshold = Parameter(
    float, ge=0, help="lambda: an entry is a task's if it is at least lambda times what the others add to it"
)


@merge_method(elementwise=True, register=False)
def used_by(*deltas: Delta, index: Parameter(int), threshold: Parameter(float)) -> Return(Tensor, "delta"):
    """The sum of the deltas where |d| >= threshold |sum - d| for the delta `index`; 0 elsewhere."""
    total, own = sum(deltas), deltas[index]
    return torch.where(own.abs() >= threshold * (total - own).abs(), total, 0)


@merge_method(elementwise=True, register=False)
def used_by_several(*deltas: Delta, least: Parameter(float), thresholds: Parameter(list[float])) -> Return(
    Tensor, "delta"
):
    """The sum of the deltas where at least `least` of them have |d| >= threshold |sum - d|; 0 elsewhere."""
    total = sum(deltas)
    uses = [
        (d.abs() >= threshold * (total - d).abs()).to(total.dtype)
        for d, threshold in zip(deltas, thresholds, strict=True)
    ]
    users = sum(uses)
    return torch.where(users >= least, total, 0)


@merge_method(composite=True, title="TALL mask")
def tall_mask(
    base: Base,
    *models: Experts,
    task: Task = 0,
    threshold: Threshold = 0.4,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale t where |d_task| >= threshold |t - d_task|, t being the sum of the task vectors.

    One sum and a bit for each entry and task hold nearly all that the fine-tuned models knew. A sweep over
    `task` writes the models of all tasks in one pass, and the paper's threshold for each task is found by
    sweeping it too.
    Agrees: the official code, but where both sides are equal: it has > there, not >=.
    Source: TALL masks, Wang et al. 2024, arXiv:2405.07813.
    """
    check_task(task, models)
    mask = {"index": task, "threshold": threshold}
    return add_merged(base, models, scale, lambda deltas: used_by(*deltas, **mask))


@merge_method(elementwise=True, register=False)
def use_of(*deltas: Delta, index: Parameter(int), threshold: Parameter(float)) -> Return(Tensor, "param"):
    """1 where |d| >= threshold |sum - d| for the delta `index`; 0 elsewhere."""
    total, own = sum(deltas), deltas[index]
    return (own.abs() >= threshold * (total - own).abs()).to(own.dtype)


@merge_method(composite=True, title="TALL mask (mask)")
def tall_mask_of(base: Base, *models: Experts, task: Task = 0, threshold: Threshold = 0.4) -> Return(
    Tensor, "param"
):
    """1 where |d_task| >= threshold |t - d_task|, and 0 elsewhere: what `tall_mask` needs of a task beside t.

    `apply_mask` makes the model of the task of it and of `task_arithmetic`. Zeros and ones are exact in any
    dtype: output.dtype=f8_e4m3 takes a byte for each.
    Agrees: the official code, but where both sides are equal: it has > there, not >=.
    Source: TALL masks, Wang et al. 2024, arXiv:2405.07813.
    """
    check_task(task, models)
    return use_of(*deltas_to(base, models), index=task, threshold=threshold)


@merge_method(composite=True)
def consensus(
    base: Base,
    *models: Experts,
    least: Parameter(int, ge=0, help="how many tasks must use an entry") = 2,
    threshold: Parameter(
        list[float],
        ge=0,
        help="lambda: an entry is a task's if it is at least lambda times what the others add to it; one "
        "number for all tasks, or a list of one for each",
    ) = 0.4,
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale t where at least `least` tasks use the entry, t being the sum of the task vectors.

    A task uses an entry if |d_i| >= threshold |t - d_i|. What one task alone uses (selfish weights) and what
    none does is left at the base. The paper finds a threshold for each task: `tall_mask` restores one task by
    it.
    Agrees: the official code.
    Source: Consensus task arithmetic, Wang et al. 2024, arXiv:2405.07813.
    """
    if least > len(models):
        raise RecipeError(
            f"least: {least} is more than the {counted(len(models), 'task')} there are, so no entry would be "
            f"merged. Give {len(models)} at most."
        )
    mask = {"least": least, "thresholds": spread(threshold, len(models))}
    return add_merged(base, models, scale, lambda deltas: used_by_several(*deltas, **mask))


@merge_method(elementwise=True, register=False)
def thresholds_of(*numbers: Small) -> Return(Tensor, "param"):
    """Numbers of the model as one vector."""
    return torch.stack(numbers)


@merge_method(elementwise=True, register=False)
def mean_of_localised(*deltas: Delta, thresholds: Small, strict: Parameter(bool)) -> Return(Tensor, "delta"):
    """The mean of the deltas whose entry reaches their threshold, or exceeds it; 0 where none does.

    An entry of 0 is not one of the largest, although it reaches the threshold 0 of a delta of few entries.
    """
    total = count = torch.zeros_like(deltas[0])
    for index, delta in enumerate(deltas):
        size = delta.abs()
        kept = size > thresholds[index] if strict else (size >= thresholds[index]) & (size > 0)
        total = total + torch.where(kept, delta, 0)
        count = count + kept.to(total.dtype)
    return torch.where(count > 0, total / count, 0)


@merge_method(composite=True, title="Localize-and-Stitch")
def localize_and_stitch(
    base: Base,
    *models: Experts,
    density: Parameter(
        float, ge=0, le=1, help="fraction of each whole task vector that is localised, by magnitude"
    ) = 0.05,
    variant: Parameter(
        str, choices=("paper", "official"), help="whether the entry at the threshold is kept"
    ) = "paper",
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale d, of each entry the mean of the d_i that localise it: those of its largest magnitudes.

    A task localises the floor(density n) largest entries of its whole task vector, n being the entries of the
    model, without any data (dataless localisation). Thresholds are found in one more trip over the data.
    Variants: paper: those entries, and what ties with the last but 0. official: only what is larger than it.
    Agrees: the official code (variant=official) on the keys that it trains masks for, which leave out
    embeddings, the last norm and the projection of the text.
    Differs: with data the paper trains the masks, which is `stitch`.
    Source: Localize-and-Stitch, He et al. 2024, arXiv:2408.13656.
    """

    def merge(deltas: list[Node]) -> Node:
        counted = {"density": density, "variant": "paper"}
        least = thresholds_of(*(model_least_kept(delta, **counted) for delta in deltas))
        return mean_of_localised(*deltas, thresholds=least, strict=variant == "official")

    return add_merged(base, models, scale, merge)


@merge_method(elementwise=True, register=False)
def total_of_elected(
    *deltas: Delta, weights: Weights, zero_sum: Parameter(str) = "none", majority: Small = 0.0
) -> Return(Tensor, "delta"):
    """sum_i weights_i d_i over the deltas whose sign is that of their unweighted sum, entry by entry.

    A zero sum elects no sign (none), or plus where `majority` is above 0 and else minus (majority).
    """
    votes = sum(deltas)
    if zero_sum == "majority":
        votes = torch.where(votes == 0, torch.where(majority > 0, 1.0, -1.0), votes)
    sign = votes.sign()
    return sum(
        torch.where((delta.sign() == sign) & (delta != 0), delta, 0) * weight
        for delta, weight in zip(deltas, weights, strict=True)
    )


@merge_method(composite=True, register=False)
def elected_total(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: KeptShares = 0.2,
    variant: Parameter(str, choices=("paper", "official")) = "paper",
) -> Return(Tensor, "delta"):
    """sum_i weights_i e_i, the merged task vector of `elected_task_arithmetic`."""
    deltas, switches = deltas_to(base, models), TIES[variant]
    kept = keep_largest(deltas, density, variant, switches.ties_kept, switches.trim)
    each = spread(weights, len(models))
    if switches.zero_sum != "majority":
        return total_of_elected(*kept, weights=each)
    surplus = model_surplus_of_signs(*kept, weights=[1.0] * len(models), elect=switches.elect)
    return total_of_elected(*kept, weights=each, zero_sum="majority", majority=surplus)


@merge_method(composite=True)
def elected_task_arithmetic(
    base: Base,
    *models: Experts,
    weights: Weights = 1.0,
    density: KeptShares = 0.2,
    scale: Scale = 1.0,
    variant: Parameter(str, choices=("paper", "official"), help="who trims and elects: see `ties`") = "paper",
) -> Return(Tensor, "weight"):
    """base + scale sum_i weights_i e_i, e_i being the entries of task vector i that TIES would merge.

    The task vectors are trimmed to their floor(density n) largest entries, and e_i keeps the entries whose
    sign is that of the sum of all. Weights have no vote in that sum, unlike those of `ties`, so the result is
    linear in them: they can be learned, as AdaMerging++ does.
    Variants: paper: trims each tensor, and a zero sum elects no sign. official: trims the whole model, one
    entry more is kept, and a zero sum elects the sign that most entries of the model have.
    Agrees: the official code of AdaMerging++ (variant=official).
    Source: AdaMerging++, Yang et al. 2024, arXiv:2310.02575; trimmed and elected as in TIES-Merging,
    arXiv:2306.01708.
    """
    if is_constant(scale, 0):
        return base
    total = elected_total(base, *models, weights=weights, density=density, variant=variant)
    return add_scaled(base, total, scale)


@merge_method(composite=True, title="MetaGPT")
def metagpt(base: Base, *models: Experts, scale: Scale = 1.0) -> Return(Tensor, "weight"):
    """base + scale sum_i l_i (model_i - base), l_i = |d_i|^2 / sum_j |d_j|^2 over all keys of the model.

    The norms are those of whole task vectors, found in one more trip over the data. Equal l_i where no model
    differs from the base.
    Agrees: the paper's formula.
    Source: MetaGPT, Zhou et al. 2024, arXiv:2406.11385.
    """

    def merge(deltas: list[Node]) -> Node:
        coefficients = shares(*(model_squared_norm(delta) for delta in deltas))
        return combination(*deltas, coefficients=coefficients)

    return add_merged(base, models, scale, merge)


@merge_method(composite=True)
def lines(
    base: Base,
    *models: Experts,
    alpha: Parameter(float, help="strength at the shallowest layer") = 0.3,
    beta: Parameter(float, help="how much stronger the deepest layer is") = 0.7,
    depth: Parameter(
        float, ge=0, le=1, help="of the key's layer: 0 the shallowest, 1 the deepest; LINEAR or by block"
    ),
    weights: Weights = 1.0,
) -> Return(Tensor, "weight"):
    """base + (alpha + beta depth) sum_i weights_i (model_i - base): shallow layers change least.

    What all tasks share lies in the shallow layers, and is kept so. The depth LINEAR is i / (L - 1) for layer
    i of L, and 0 for what lies in no layer; else give each block its own.
    Agrees: the official code, with depth LINEAR.
    Differs: for several tasks the official code reckons alpha from norms, |sum| / |merged| / N over the whole
    model; here alpha is given.
    Source: LiNeS, Wang et al. 2024, arXiv:2410.17146.
    """
    return task_arithmetic(base, *models, weights=weights, scale=alpha + beta * depth)

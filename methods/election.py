"""One delta that is elected from all, and what of it belongs to each task."""

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, merge_method, reduction, whole_model
from mecha_exp.methods.linear import add_merged, deltas_to
from mecha_exp.methods.parameters import Base, Delta, Experts, Model, Scale, Small, Task, check_task
from mecha_exp.methods.reductions import sum_of_magnitudes


@merge_method(elementwise=True, register=False)
def largest_entries(*deltas: Delta) -> Return(Tensor, "delta"):
    """The entry of the largest magnitude; of equal ones that of the last delta."""
    chosen = deltas[0]
    for delta in deltas[1:]:
        chosen = torch.where(delta.abs() >= chosen.abs(), delta, chosen)
    return chosen


@merge_method(composite=True, title="MagMax")
def magmax(base: Base, *models: Experts, scale: Scale = 0.5) -> Return(Tensor, "weight"):
    """base + scale d, of each entry the d_i of the largest magnitude; of equal ones that of the last model.

    Agrees: the official code.
    Source: MagMax, Marczak et al. 2024, arXiv:2407.06322.
    """
    return add_merged(base, models, scale, lambda deltas: largest_entries(*deltas))


def unified(deltas: tuple[Tensor, ...], zero_sum: float) -> Tensor:
    """The largest magnitude among the entries with the sign of their sum, and that sign."""
    total = sum(deltas)
    sign = torch.where(total == 0, zero_sum, total.sign())
    largest = torch.zeros_like(total)
    for delta in deltas:
        magnitude = torch.where(delta * sign > 0, delta.abs(), 0)
        largest = torch.where(magnitude > largest, magnitude, largest)
    return sign * largest


def of_task(deltas: tuple[Tensor, ...], index: int, zero_sum: float) -> Tensor:
    """What of the unified delta has the sign of the delta `index`; 0 elsewhere."""
    elected = unified(deltas, zero_sum)
    return torch.where(deltas[index].sign() * elected > 0, elected, 0)  # a product of both may be 0


@merge_method(elementwise=True, register=False)
def elected_entries(*deltas: Delta, zero_sum: Parameter(float)) -> Return(Tensor, "delta"):
    """The unified delta; see `emr_unified`."""
    return unified(deltas, zero_sum)


@merge_method(elementwise=True, register=False)
def elected_of_task(*deltas: Delta, index: Parameter(int), zero_sum: Parameter(float)) -> Return(
    Tensor, "delta"
):
    """The unified delta where it has the sign of the delta `index`."""
    return of_task(deltas, index, zero_sum)


model_magnitudes = whole_model(sum_of_magnitudes)


@reduction(sums=True, finish=lambda total, count, **_: torch.as_tensor(1 / count).double(), register=False)
def share_of_entry(a: Model) -> Return(Tensor, "param"):
    """1 / n, n being the entries of the tensor."""
    return a.double()


@reduction(sums=True, register=False)
def weighted_magnitudes(a: Model, share: Small) -> Return(Tensor, "param"):
    """The sum of the magnitudes times a number of their tensor."""
    return a.double().abs() * share


model_weighted_magnitudes = whole_model(weighted_magnitudes)


@merge_method(elementwise=True, register=False)
def over(a: Small, b: Small) -> Return(Tensor, "param"):
    """a / b; 0 where b is 0."""
    return torch.where(b > 0, a / b, 0)


@merge_method(elementwise=True, register=False)
def times(delta: Delta, factor: Small) -> Return(Tensor, "delta"):
    """delta times a number of the model."""
    return delta * factor


Variant = Parameter(
    str, choices=("paper", "official"), help="what a zero sum elects, and how keys count in the scales"
)


def _zero_sum(variant: str) -> float:
    return 0.0 if variant == "paper" else -1.0


def _own_and_scale(deltas: list[Node], task: int, variant: str) -> tuple[Node, Node]:
    """The entries of the unified delta that are a task's, and the number that makes up for their size."""
    own = elected_of_task(*deltas, index=task, zero_sum=_zero_sum(variant))
    if variant == "paper":
        sizes = [model_magnitudes(part) for part in (deltas[task], own)]
    else:
        share = share_of_entry(deltas[task])
        sizes = [model_weighted_magnitudes(part, share=share) for part in (deltas[task], own)]
    return own, over(*sizes)


@merge_method(composite=True, title="EMR-Merging (unified)")
def emr_unified(base: Base, *models: Experts, variant: Variant = "paper", scale: Scale = 1.0) -> Return(
    Tensor, "weight"
):
    """base + scale t: each entry has the sign of sum_i d_i and the largest magnitude of those that agree.

    What EMR-Merging stores once for all tasks; `emr` makes a task's model of it.
    Variants: as `emr`.
    Agrees: the paper's formula (variant=paper), the official code (variant=official).
    Source: EMR-Merging, Huang et al. 2024, arXiv:2405.17461.
    """
    return add_merged(base, models, scale, lambda x: elected_entries(*x, zero_sum=_zero_sum(variant)))


@merge_method(composite=True, title="EMR-Merging")
def emr(
    base: Base,
    *models: Experts,
    task: Task = 0,
    variant: Variant = "paper",
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale l t where t has the sign of d_task, t being the unified task vector of `emr_unified`.

    l makes up for the magnitude: |d_task| over |t where it has that sign|, of the whole model, found in one
    more trip over the data. A bit for each entry and a number for each task restore a model from t; a sweep
    over `task` writes the models of all tasks in one pass.
    Variants: paper: l is a ratio of sums over the model, and a zero sum elects no sign. official: each key
    adds its mean to those sums, and a zero sum counts as negative.
    Agrees: the paper's formula (variant=paper), the official code (variant=official).
    Source: EMR-Merging, Huang et al. 2024, arXiv:2405.17461.
    """
    check_task(task, models)
    return add_merged(base, models, scale, lambda deltas: times(*_own_and_scale(deltas, task, variant)))


@merge_method(elementwise=True, register=False)
def where_kept(delta: Delta, size: Small) -> Return(Tensor, "param"):
    """`size` where the delta is not 0; 0 elsewhere."""
    return torch.where(delta != 0, size, 0)


@merge_method(composite=True, title="EMR-Merging (mask)")
def emr_mask(base: Base, *models: Experts, task: Task = 0, variant: Variant = "paper") -> Return(
    Tensor, "param"
):
    """l where t has the sign of d_task, and 0 elsewhere: what `emr` needs of a task beside `emr_unified`.

    Mask and scale in one file, of which `apply_mask` makes the model of the task. One pass writes the unified
    model and the masks of all tasks.
    Variants: as `emr`.
    Agrees: the paper's formula (variant=paper), the official code (variant=official).
    Source: EMR-Merging, Huang et al. 2024, arXiv:2405.17461.
    """
    check_task(task, models)
    return where_kept(*_own_and_scale(deltas_to(base, models), task, variant))


@merge_method(elementwise=True)
def apply_mask(
    base: Base,
    merged: Parameter(Tensor, "weight", help="the model of all tasks"),
    mask: Parameter(
        Tensor, "param", help="of a task: model(FILE, 'param') of what `emr_mask` or `tall_mask_of` has made"
    ),
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale mask (merged - base), entry by entry.

    With `emr_unified` and `emr_mask` it is `emr`, with `task_arithmetic` and `tall_mask_of` `tall_mask`.
    Agrees: the official codes, which keep mask and scale apart.
    Source: EMR-Merging, Huang et al. 2024, arXiv:2405.17461; TALL masks, Wang et al. 2024, arXiv:2405.07813.
    """
    return base + scale * mask * (merged - base)

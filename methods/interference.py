"""Task vectors as inputs of their own layers: what disturbs a task, measured on them."""

import math
from typing import Any

import torch
from torch import Tensor

from mecha_exp import Node, Parameter, Return, factor, merge_method
from mecha_exp.methods.linear import add_merged, n_average
from mecha_exp.methods.parameters import Base, Delta, Experts, Scale, Small


def interference_terms(deltas: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """A = sum_i d_i^T d_i / |d_i|^2 and B = sum_i d_i d_i^T d_i / |d_i|^2, of which WUDI's loss is made.

    sum_i |(t - d_i) d_i^T|^2 / |d_i|^2 has the gradient 2 (t A - B). Deltas of no size add nothing.
    """
    columns = deltas[0].shape[1]
    gram = deltas[0].new_zeros(columns, columns)
    target = torch.zeros_like(deltas[0])
    for delta in deltas:
        size = delta.square().sum()
        if size > 0:
            own = delta.mT @ delta / size
            gram += own
            target += delta @ own
    return gram, target


def minimiser(gram: Tensor, target: Tensor) -> Tensor:
    """B A^+: of all minimisers that of least norm, where gradient descent from sum_i d_i ends.

    A and B are in float64: in float32 the rounding errors of A would count as directions, and have no limit.
    """
    sizes, vectors = torch.linalg.eigh(gram)
    known = sizes > sizes.amax() * len(sizes) * torch.finfo(gram.dtype).eps
    inverse = torch.where(known, 1 / sizes, 0)
    return target @ vectors * inverse @ vectors.mT


def adam(start: Tensor, gram: Tensor, target: Tensor, steps: int, rate: float) -> Tensor:
    """Adam (Kingma & Ba 2014, arXiv:1412.6980) with torch's defaults on the gradient 2 (t A - B)."""
    made = start.clone()
    first, second = torch.zeros_like(made), torch.zeros_like(made)
    for step in range(1, steps + 1):
        gradient = 2 * (made @ gram - target)
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        spread = (second.sqrt() / math.sqrt(1 - 0.999**step)).add_(1e-8)
        made.addcdiv_(first, spread, value=-rate / (1 - 0.9**step))
    return made


@factor(elements=lambda shape: math.prod(shape))
def without_interference(
    *deltas: Delta, solver: Parameter(str), steps: Parameter(int), rate: Parameter(float), **kwargs: Any
) -> Return(Tensor, "param"):
    """The delta of least interference for a matrix; nothing for other tensors. See `wudi`."""
    if deltas[0].ndim != 2 or "text_projection" in kwargs["key"] or not deltas[0].numel():
        return ()
    if solver == "closed":
        wide = interference_terms(tuple(delta.double() for delta in deltas))
        return (minimiser(*wide).to(deltas[0].dtype),)
    return (adam(sum(deltas), *interference_terms(deltas), steps, rate),)


@merge_method(register=False)
def solved_or_rest(mean: Delta, solved: Small, others: Parameter(str)) -> Return(Tensor, "delta"):
    """What was solved for; else the mean, or zeros where the others stay the base's."""
    if solved:
        return solved[0]
    return mean.clone() if others == "mean" else torch.zeros_like(mean)


@merge_method(composite=True)
def wudi(
    base: Base,
    *models: Experts,
    solver: Parameter(
        str, choices=("adam", "closed"), help="steps of Adam as the authors take them, or the minimiser"
    ) = "adam",
    steps: Parameter(int, ge=0, help="of Adam") = 300,
    rate: Parameter(float, gt=0, help="learning rate of Adam") = 1e-5,
    others: Parameter(
        str, choices=("base", "mean"), help="what tensors that are not matrices get of the task vectors"
    ) = "base",
    scale: Scale = 1.0,
) -> Return(Tensor, "weight"):
    """base + scale t, t of least sum_i |(t - d_i) d_i^T|^2 / |d_i|^2 for each matrix, d_i the task vectors.

    A task vector's rows lie in the span of the inputs that its layer was trained on, so the sum bounds what
    the merge does to them. Adam begins at sum_i d_i and moves an entry by at most about rate times steps;
    `closed` is the minimiser itself, B A^+ with A = sum_i d_i^T d_i / |d_i|^2 and B = sum_i d_i d_i^T d_i /
    |d_i|^2, where gradient descent would end. Matrices are the tensors of two axes, but for CLIP's
    text_projection. Needs whole tensors; a solution serves all strengths of a sweep.
    Agrees: the official code (solver=adam), whose gradient comes from autograd.
    Differs: the official code names the layers of CLIP's encoder, so that embeddings stay the base's; here
    every tensor of two axes is a matrix. FusionBench gives other tensors the mean: others=mean.
    Source: WUDI-Merging, Cheng et al. 2025, arXiv:2503.08099.
    """

    def merge(deltas: list[Node]) -> Node:
        solved = without_interference(*deltas, solver=solver, steps=steps, rate=rate)
        return solved_or_rest(n_average(*deltas), solved, others=others)

    return add_merged(base, models, scale, merge)

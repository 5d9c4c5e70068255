"""Other weights of the same network: its hidden units in another order, its attention balanced.

The model config names the units (`symmetries`). Tensors that share units are made together: in
memory is one such group at a time, a few times over, and for `rebasin` that of the reference, and a number in
float64 for each pair of units of a layer.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mecha_exp import Parameter, RecipeError, Return, StateDict, merge_method
from mecha_exp.architectures import AxisSlice, ModelConfig, Symmetry, linked
from mecha_exp.extensions.merge_methods import uniforms
from mecha_exp.methods.parameters import Seed

Tensors = Mapping[str, Tensor]
Orders = dict[Symmetry, Tensor]
"""The old indices of the units in their new order, by symmetry: int64 [heads, width]."""

EPS = 1e-6
"""Added to the energies of a head; also the smallest energy that counts."""
TOLERANCE = 1e-9
"""The relative improvement that an order needs to be accepted."""


def in_groups(b: Any, models: str = "a", of_attention: bool = False) -> None:
    """`map_keys`: tensors that share units are made together; `meta` is what may be exchanged in them.

    Args:
        b: the builder of the method.
        models: the argument that has the model, or models of the same keys.
        of_attention: only heads of attention.
    """
    given = getattr(b, models)
    for group in linked(_symmetries(given.model_config, given.keys(), of_attention)):
        keys = tuple(dict.fromkeys(key for symmetry in group for key in symmetry.keys))
        b[keys] = given.keys[keys] @ group
    for key in given.keys():
        if key not in b.needs:
            b[key] = given.keys[key]


def _symmetries(config: ModelConfig, keys: Collection[str], of_attention: bool) -> list[Symmetry]:
    found = [symmetry for symmetry in config.symmetries(keys) if symmetry.linear or not of_attention]
    if not found:
        what = "heads of attention" if of_attention else "units that may change places"
        raise RecipeError(
            f"the model config '{config.identifier}' names no {what} among these keys. Write them into a "
            "config of your own under `symmetries`: see docs/model-configs.md."
        )
    return found


@merge_method
class rebasin:
    """a with its hidden units in the order in which they are most like those of ref: argmax_P <ref, P(a)>.

    a computes what it did, but its weights can be averaged with those of ref: units that do the same are in
    the same place. Each layer is a linear assignment problem; layers that share a tensor are solved in
    turn, in the order of the model config, until nothing changes. Products are in the dtype of the
    arithmetic, assignments in float64. Heads of attention stay where they are: units change places inside
    theirs. The model config of a says which units there are (`symmetries` in docs/model-configs.md). In
    memory is one layer at a time, and about 20 n^2 bytes for n units: 520 MB for the widest of SDXL.

    Agrees: the paper's weight matching, sd-mecha.
    Source: Git Re-Basin, weight matching (Ainsworth et al. 2022, arXiv:2209.04836); sd-mecha.
    """

    map_keys = staticmethod(in_groups)

    def __call__(
        self,
        a: Parameter(StateDict[Tensor]),
        ref: Parameter(StateDict[Tensor]),
        iters: Parameter(int, ge=1, help="rounds over the layers that share a tensor, at most") = 10,
        **kwargs: Any,
    ) -> Return(Tensor):
        tensors, group = read_group(a, kwargs)
        if not group:
            return tensors
        reference = {key: ref[key] for key in tensors if key in ref}
        return permuted(tensors, matched(tensors, reference, group, iters))


@merge_method
class randperm:
    """a with its hidden units in a random order; it computes what it did. `rebasin` finds the way back.

    The order depends on the seed and on the names of the tensors alone. What may change places, and what that
    takes, is said of `rebasin`.

    Source: sd-mecha.
    """

    map_keys = staticmethod(in_groups)

    def __call__(self, a: Parameter(StateDict[Tensor]), seed: Seed = None, **kwargs: Any) -> Return(Tensor):
        tensors, group = read_group(a, kwargs)
        return permuted(tensors, {symmetry: drawn(symmetry, seed or 0) for symmetry in group})


@merge_method
class balance_attention:
    """a with the same energy in queries and keys, and in values and outputs: S^alpha q, S^-alpha k.

    S is the geometric mean of (q q^T)^-1 and k k^T of a head, so S (q q^T) S = k k^T. With alpha = 1/2 both
    sides have one and the same matrix of products afterwards; with 0 nothing changes, and with 1 they
    exchange theirs, which is what sd-mecha 1.1.8 does. Biases of q, k and v count as one more column. The
    network computes what it did, but for rounding. Decompositions are in float64. The model config of a
    says which heads there are (`symmetries` in docs/model-configs.md).

    Source: sd-mecha.
    """

    map_keys = staticmethod(partial(in_groups, of_attention=True))

    def __call__(
        self,
        a: Parameter(StateDict[Tensor]),
        alpha: Parameter(float, ge=0, le=1, help="how far: 0.5 balances, 1 exchanges as in sd-mecha") = 0.5,
        **kwargs: Any,
    ) -> Return(Tensor):
        tensors, group = read_group(a, kwargs)
        return balanced(tensors, group, alpha)


def read_group(a: StateDict[Tensor], kwargs: Mapping[str, Any]) -> tuple[Tensors, Sequence[Symmetry]]:
    """The tensors that are made together, and what may be exchanged in them.

    Nothing in tensors without values. The key that is asked for is read first: its dtype is the output's.
    """
    relation = kwargs["key_relation"]
    tensors = {key: a[key] for key in (kwargs["key"], *relation.outputs)}
    return tensors, () if tensors[kwargs["key"]].is_meta else relation.meta or ()


def permuted(tensors: Tensors, orders: Orders) -> Tensors:
    """The tensors with their units in a new order."""
    made = dict(tensors)
    for symmetry, order in orders.items():
        for place in symmetry.places:
            units = units_at(made[place.key], place, symmetry)
            moved = units.take_along_dim(order.unsqueeze(-1), dim=1)
            made[place.key] = with_units(made[place.key], place, moved)
    return made


def matched(tensors: Tensors, reference: Tensors, group: Sequence[Symmetry], iters: int) -> Orders:
    """The orders in which the units are most like those of a reference, which may lack tensors."""
    orders = {symmetry: as_they_are(symmetry) for symmetry in group}
    for _ in range(iters):
        changed = [_match(symmetry, tensors, reference, orders) for symmetry in group]
        if not any(changed):
            break
    return orders


def _match(symmetry: Symmetry, tensors: Tensors, reference: Tensors, orders: Orders) -> bool:
    """Order the units of one layer, all others being as they are; whether that changed anything."""
    scores = torch.zeros(symmetry.heads, symmetry.width, symmetry.width, dtype=torch.float64)
    for place in symmetry.places:
        if place.key in reference:
            wanted = units_at(reference[place.key], place, symmetry)
            given = units_at(_other_axes(tensors[place.key], place, orders), place, symmetry)
            scores += wanted @ given.mT
    old, new = orders[symmetry], assigned(scores)
    before, after = (scores.take_along_dim(x.unsqueeze(-1), dim=2).sum((1, 2)) for x in (old, new))
    better = after > before + TOLERANCE * before.abs()
    orders[symmetry] = torch.where(better.unsqueeze(-1), new, old)
    return bool(better.any())


def assigned(scores: Tensor) -> Tensor:
    """The order of columns that makes the sum of a diagonal largest, for each matrix of a batch: int64.

    Args:
        scores: float64 [heads, width, width], the rows being the places.
    """
    from scipy.optimize import linear_sum_assignment  # half a second, which only these methods are worth

    best = [torch.from_numpy(linear_sum_assignment(score, maximize=True)[1]) for score in scores.numpy()]
    return torch.stack(best)


def _other_axes(tensor: Tensor, place: AxisSlice, orders: Orders) -> Tensor:
    """A tensor whose units along the other axes are in the order that they have so far."""
    for symmetry, order in orders.items():
        for other in symmetry.places:
            if other.key == place.key and other.axis != place.axis:
                moved = units_at(tensor, other, symmetry).take_along_dim(order.unsqueeze(-1), dim=1)
                tensor = with_units(tensor, other, moved)
    return tensor


def drawn(symmetry: Symmetry, seed: int) -> Tensor:
    """A random order of the units of each head."""
    name = ":".join(map(str, symmetry.places[0]))
    draws = torch.from_numpy(uniforms(name, 0, symmetry.heads * symmetry.width, seed, 0))
    return draws.reshape(symmetry.heads, symmetry.width).argsort(dim=1, stable=True)


def as_they_are(symmetry: Symmetry) -> Tensor:
    return torch.arange(symmetry.width).repeat(symmetry.heads, 1)


def balanced(tensors: Tensors, group: Sequence[Symmetry], alpha: float) -> Tensors:
    """The tensors with both sides of linear symmetries brought nearer to each other: S^alpha and S^-alpha."""
    made = dict(tensors)
    for symmetry in group if alpha else ():
        first, second = (
            torch.cat([units_at(made[place.key], place, symmetry) for place in side], dim=2).double()
            for side in symmetry.sides
        )
        values, vectors = torch.linalg.eigh(_between(first @ first.mT, second @ second.mT))
        for side, exponent in zip(symmetry.sides, (alpha, -alpha), strict=True):
            matrix = _of_eigenvalues(values.pow(exponent), vectors)
            for place in side:
                units = units_at(made[place.key], place, symmetry)
                turned = (matrix @ units.double()).to(units.dtype)
                made[place.key] = with_units(made[place.key], place, turned)
    return made


def _between(a: Tensor, b: Tensor) -> Tensor:
    """The symmetric S with S a S = b: a^-1/2 (a^1/2 b a^1/2)^1/2 a^-1/2."""
    a, b = (x + EPS * torch.eye(x.shape[-1], dtype=x.dtype) for x in (a, b))
    values, vectors = torch.linalg.eigh(a)
    root, inverse = (_of_eigenvalues(values.clamp_min(EPS).pow(e), vectors) for e in (0.5, -0.5))
    values, vectors = torch.linalg.eigh(root @ b @ root)
    return inverse @ _of_eigenvalues(values.clamp_min(EPS).sqrt(), vectors) @ inverse


def _of_eigenvalues(values: Tensor, vectors: Tensor) -> Tensor:
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def units_at(tensor: Tensor, place: AxisSlice, symmetry: Symmetry) -> Tensor:
    """The units at a place as vectors, [heads, width, what else the tensor has]."""
    part = tensor.narrow(place.axis, place.start, symmetry.heads * symmetry.width)
    return part.movedim(place.axis, 0).reshape(symmetry.heads, symmetry.width, -1)


def with_units(tensor: Tensor, place: AxisSlice, units: Tensor) -> Tensor:
    """A copy of a tensor with other units at a place."""
    made = tensor.clone()
    part = made.movedim(place.axis, 0)[place.start : place.start + units.shape[0] * units.shape[1]]
    part.copy_(units.reshape(part.shape))
    return made

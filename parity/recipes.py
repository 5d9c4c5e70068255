"""Our words for what the oracles compute, and what they give on the same inputs, through the engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import mecha_exp as m
from parity.inputs import MODELS, inputs

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
ORACLES = {name: load_file(GOLDEN / f"{name}.safetensors") for name in ("sd-mecha", "mergekit")}
WEIGHTS = [0.5, 0.3, 0.9]

Recipe = Callable[..., m.Node]


def of_deltas(method: m.MergeMethod, **settings: object) -> Recipe:
    return lambda *x: method(*(m.subtract(model, x[0]) for model in x[1:]), **settings)


def ones(like: m.Node) -> m.Node:
    """A delta of ones."""
    return m.model({key: torch.ones_like(tensor) for key, tensor in like.source.state_dict.items()}, "delta")


def mask_of(method: m.MergeMethod) -> Recipe:
    """A mask is no model: here it is added to zeros, times ones."""
    return lambda *x: everywhere(method(*x[:3], alpha=0.7), x[0])


def everywhere(number: m.Node, like: m.Node) -> m.Node:
    """A number of each key as a model, in every entry."""
    return m.add_difference(m.scale(ones(like), alpha=0.0), ones(like), alpha=number)


RECIPES: dict[str, Recipe] = {
    # sd-mecha
    "weighted_sum": lambda *x: m.weighted_sum(*x[:2], alpha=0.3),
    "n_average": lambda *x: m.n_average(*x),
    "slerp": lambda *x: m.slerp(*x[:2], alpha=0.3),
    "perpendicular_component": lambda *x: m.perpendicular_component(*x[:2]),
    "train_difference_mask": mask_of(m.train_difference_mask),
    "add_opposite_mask": mask_of(m.add_opposite_mask),
    "add_strict_opposite_mask": mask_of(m.add_strict_opposite_mask),
    "geometric_sum": lambda *x: m.geometric_sum(*x[:2], alpha=0.3),
    "multiply_quotient": lambda *x: m.multiply_quotient(*x[:3], alpha=0.7),
    "add_cosine_a": lambda *x: m.add_cosine_a(*x[:2], alpha=0.2),
    "add_cosine_b": lambda *x: m.add_cosine_b(*x[:2], alpha=0.2),
    "ties_sum": of_deltas(m.ties_sum, k=0.4),
    "ties_sum by value": of_deltas(m.ties_sum, k=0.7, vote_sgn=True),
    # sd-mecha 1.1.8 has apply_stock the wrong way round: its True is our False
    "ties_sum_extended": of_deltas(m.ties_sum_extended, k=0.4, apply_stock=False),
    "ties_sum_extended with stock": of_deltas(m.ties_sum_extended, k=0.4, apply_stock=True),
    "ties_sum_extended with median": of_deltas(m.ties_sum_extended, k=0.6, apply_median=True, maxiter=7),
    "ties_sum_with_dropout": of_deltas(m.ties_sum_with_dropout, probability=0.0, k=0.4),
    "model_stock": of_deltas(m.model_stock),
    "geometric_median": lambda *x: m.geometric_median(*x, maxiter=7),
    "tensor_sum": lambda *x: m.tensor_sum(*x[:2], width=0.4, offset=0.3),
    "tensor_sum around the end": lambda *x: m.tensor_sum(*x[:2], width=0.6, offset=0.7),
    "tensor_sum backwards": lambda *x: m.tensor_sum(*x[:2], width=-0.5, offset=0.25),
    "top_k_tensor_sum": lambda *x: m.top_k_tensor_sum(*x[:2]),
    "top_k_tensor_sum in a window": lambda *x: m.top_k_tensor_sum(*x[:2], width=0.45, offset=0.35),
    "top_k_tensor_sum around the end": lambda *x: m.top_k_tensor_sum(*x[:2], width=0.5, offset=0.8),
    "crossover": lambda *x: m.crossover(*x[:2], alpha=0.37),
    "crossover with a slope": lambda *x: m.crossover(*x[:2], alpha=0.37, tilt=0.6),
    "crossover turned": lambda *x: m.crossover(*x[:2], alpha=0.37, tilt=2.6),
    "clamp": lambda *x: m.clamp(*x),
    "clamp, stiff": lambda *x: m.clip(*x, stiffness=0.7),
    "rotate": lambda *x: m.rotate(*x[:2], centralization=0.6),
    "rotate and blend": lambda *x: m.rotate(*x[:2], alpha=0.4, centralization=0.6),
    "rotate in part": lambda *x: m.rotate(
        *x[:2], alignment=0.3, alpha=0.4, centralization=0.6, stiefel_eps=1e-12
    ),
    "get_rank_from_ratio": lambda *x: everywhere(m.get_rank_from_ratio(x[0], ratio=0.4), x[0]),
    "truncate_rank": lambda *x: delta_of(m.truncate_rank, x[0], rank=3, use_approximate_basis=False),
    "truncate_kronecker": lambda *x: delta_of(m.truncate_kronecker, x[0], use_approximate_basis=False),
    "truncate_kronecker by ratio": lambda *x: delta_of(
        m.truncate_kronecker, x[0], kronecker_ratio=0.25, use_approximate_basis=False
    ),
    "add_difference": lambda *x: m.add_difference(*x[:3], alpha=0.75),
    "add_difference, clamped": lambda *x: m.add_difference(*x[:3], alpha=0.75, clamp_to_ab=True),
    "subtract and scale": lambda *x: m.add_difference(x[0], m.scale(m.subtract(*x[1:3]), alpha=-0.5)),
    "add_perpendicular": lambda *x: m.add_perpendicular(*x[:3], alpha=0.75),
    "n_model_stock": lambda *x: m.n_model_stock(*x),
    "add_ties_with_dare": lambda *x: m.add_ties_with_dare(*x, probability=0.0, k=0.4, alpha=0.75),
    "copy_region": lambda *x: m.copy_region(*x[:2], width=0.4, offset=0.3),
    "copy_region of differences": lambda *x: m.copy_region(*x[:3], width=0.4, offset=0.3),
    "copy_region by rank": lambda *x: m.copy_region(*x[:3], width=0.45, offset=0.35, top_k=True),
    # mergekit
    "linear": lambda *x: m.linear(*x, weights=[0.2, *WEIGHTS]),
    "linear, not normalized": lambda *x: m.linear(*x, weights=[0.2, *WEIGHTS], normalize=False),
    "task_arithmetic": lambda *x: m.task_arithmetic(*x, weights=WEIGHTS, scale=0.8),
    "passthrough": lambda *x: m.passthrough(x[0], scale=0.7),
    "slerp_raw": lambda *x: m.slerp_raw(*x[:2], alpha=0.3),
    "nuslerp": lambda *x: m.nuslerp(*x[:2], weight_a=0.3, weight_b=0.9),
    "nuslerp from a base": lambda *x: m.nuslerp(*x[1:3], base=x[0], weight_a=0.3, weight_b=0.9),
    "nuslerp by the last axis": lambda *x: m.nuslerp(*x[:2], weight_a=0.3, weight_b=0.9, flatten=False),
    "nuslerp by the first axis": lambda *x: m.nuslerp(
        *x[:2], weight_a=0.3, weight_b=0.9, flatten=False, row_wise=True
    ),
    "multislerp": lambda *x: m.multislerp(*x, weights=[0.2, *WEIGHTS], eps=1e-8),
    "multislerp from a base": lambda *x: m.multislerp(*x[1:], base=x[0], weights=WEIGHTS, eps=1e-8),
    "karcher": lambda *x: m.karcher(*x),
    "ties": lambda *x: m.ties(*x, weights=WEIGHTS, density=0.4, scale=0.8),
    "ties, not normalized": lambda *x: m.ties(*x, weights=WEIGHTS, density=0.4, combine="sum"),
    "ties with opposite weights": lambda *x: m.ties(*x, weights=[1.0, -0.5, 0.3], density=[0.3, 0.6, 1.0]),
    "dare_linear": lambda *x: m.dare_linear(*x, weights=WEIGHTS, density=1.0),
    "dare_ties": lambda *x: m.dare_ties(*x, weights=WEIGHTS, density=1.0),
    "della": lambda *x: m.della(*x, weights=WEIGHTS, density=1.0),
    "della_linear": lambda *x: m.della_linear(*x, weights=WEIGHTS, density=1.0),
    "breadcrumbs": lambda *x: m.breadcrumbs(*x, weights=WEIGHTS, density=0.6, gamma=0.1),
    "breadcrumbs with too much gamma": lambda *x: m.breadcrumbs(*x, weights=WEIGHTS, density=0.9, gamma=0.3),
    "breadcrumbs_ties": lambda *x: m.breadcrumbs_ties(*x, weights=WEIGHTS, density=0.6, gamma=0.1),
    "sce": lambda *x: m.sce(*x),
    "sce of some": lambda *x: m.sce(*x, select_topk=0.3),
    "ram": lambda *x: m.ram(*x, epsilon=0.7),
    "ramplus_tl": lambda *x: m.ramplus_tl(*x, epsilon=0.7, r=0.3, alpha=0.4),
    "nearswap": lambda *x: m.nearswap(*x[:2], t=0.6),
    "arcee_fusion": lambda *x: m.arcee_fusion(*x[:2]),
    "model_stock_pairwise": lambda *x: m.model_stock_pairwise(*x),
    "model_stock_pairwise by row": lambda *x: m.model_stock_pairwise(*x, filter_wise=True),
}


def delta_of(method: m.MergeMethod, x: m.Node, **settings: object) -> m.Node:
    """A method of deltas, on a model taken for one."""
    return method(m.model(x.source.state_dict, "delta"), **settings)


WRONG = {
    ("slerp", "one"): "two numbers of opposite signs have no arc, and it gives about 0, not the weighted sum",
    **{
        (name, key): "with more columns than rows its map is not orthogonal, and not nearest to b"
        for name in ("rotate", "rotate and blend", "rotate in part")
        for key in ("row", "wide")
    },
}
"""Where sd-mecha 1.1.8 is mistaken; test_methods.py and test_method_numbers.py say what is right."""

ACCURACY = {"rotate in part": 1e-7}
"""Of what is found by iteration: sd-mecha stops at 1e-8, and its logarithm diverges if it is to go on."""


ROUNDED = {torch.float64: torch.float32, torch.float32: torch.float32} | {
    dtype: dtype for dtype in (torch.float16, torch.bfloat16)
}
LABELS = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def expected(name: str, label: str) -> dict[str, Tensor]:
    """What the oracle gave, by key."""
    return {
        key.split("|")[2]: tensor
        for golden in ORACLES.values()
        for key, tensor in golden.items()
        if key.split("|")[:2] == [name, label] and (name, key.split("|")[2]) not in WRONG
    }


def merged(name: str, dtype: torch.dtype, compute_dtype: torch.dtype, keys: list[str], **options: object):
    """The recipe on the inputs, through the engine."""
    models = [m.model({key: model[key].to(dtype) for key in keys}) for model in inputs(ROUNDED[dtype])]
    recipe = RECIPES[name](*models[:MODELS])
    return m.merge(recipe, options=m.EngineOptions(compute_dtype=compute_dtype, **options), dtype=dtype)


def tolerance(name: str, dtype: torch.dtype, wanted: Tensor) -> dict[str, float]:
    """How near we must come: in float64 to a billionth, else to the rounding of the output and of float32."""
    if dtype is torch.float64:
        return dict.fromkeys(("rtol", "atol"), ACCURACY.get(name, 1e-9))
    return {"rtol": max(torch.finfo(dtype).eps, 1e-5), "atol": 1e-5 * wanted.abs().max().item() + 1e-7}


def compared(name: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of each key what we make, through tiles and several workers, and what the oracle gave."""
    wanted = expected(name, LABELS.get(dtype, "float32"))
    arithmetic = torch.float64 if dtype is torch.float64 else torch.float32
    made = merged(name, dtype, arithmetic, list(wanted), workers=3, tile_size=16)
    for key, tensor in wanted.items():
        shape = made[key].shape
        yield key, made[key].double(), tensor.reshape(shape) if tensor.ndim else tensor.expand(shape)

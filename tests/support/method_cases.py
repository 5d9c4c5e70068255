"""All built-in merge methods by what they need, and how each is called on tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from state_dicts import StateDict
from torch import Tensor

import mecha_exp as m
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.registry import BUILTIN_METHODS, all_methods

KEY_LESS = {"get_rank_from_ratio", "dot", "gram", "norm", "squared_norm", "kth_magnitude"}
KEY_LESS |= {"model_dot", "model_norm", "model_squared_norm", "model_kth_magnitude", "model_mean"}
"""Numbers of a key or of a model, which are no model by themselves."""
OF_NETWORKS = {"balance_attention", "randperm", "rebasin"}
"""Of models whose config says what layers there are: tests/test_symmetries.py."""
OF_ADAPTERS = {
    "extract_diffusers_lora",
    "extract_kohya_lokr",
    "extract_kohya_lora",
    "extract_lycoris_lokr",
    "extract_lycoris_lora",
    "lora_delta",
}
"""Of files whose keys are not those of models: tests/lora."""
WITH_DATA = {
    "df_merge",
    "fisher",
    "rebasin_by_activations",
    "regmean",
    "regmean_plus_plus",
    "statistics",
    "stitch",
    "zipit",
}
"""Methods that read statistics from files: their tests are in tests/calibration."""
METHODS = [
    method
    for method in all_methods()
    if method.__wrapped__.__module__.startswith(BUILTIN_METHODS)
    and method.identifier not in KEY_LESS | OF_NETWORKS | OF_ADAPTERS | WITH_DATA
    and not method.__wrapped__.__module__.endswith("plumbing")
]
MASKS = [method for method in METHODS if method.signature.returned.spaces == ("param",)]
MERGES = [method for method in METHODS if method not in MASKS]
OPTIONS = m.EngineOptions(compute_dtype=torch.float64, workers=2, tile_size=32)


def bound(method: MergeMethod, models: Sequence[Tensor | StateDict], **given: Any) -> m.Node:
    """The method on models, deltas being taken to the last one."""
    nodes = [m.model(x if isinstance(x, dict) else {"w": x}) for x in models]
    base = nodes[-1]

    def fit(node: m.Node, spaces: tuple[str, ...] | None) -> m.Node:
        return m.subtract(node, base) if spaces == ("delta",) else node

    rest = nodes[:-1]
    named: dict[str, Any] = dict(given)
    for spec in method.signature.parameters:
        if spec.name in given:
            continue
        if spec.variadic:
            named[spec.name] = [fit(node, spec.spaces) for node in rest]
        elif spec.is_model and (spec.required or spec.name in ("base", "c")):
            node = base if spec.name in ("base", "c") else rest.pop(0)
            named[spec.name] = fit(node, spec.spaces)
        elif spec.required:
            named[spec.name] = 0.5
    node, problems = method.bind(named)
    assert node is not None, problems
    return node


def run(node: m.Node, options: m.EngineOptions = OPTIONS) -> Tensor:
    return m.merge(node, options=options)["w"]


def applied(method: MergeMethod, models: list[Tensor], **given: Any) -> Tensor:
    node = bound(method, models, **given)
    if method in MASKS:  # a mask is no model: here it is added to zeros, times ones
        zeros, ones = (
            m.model({"w": value}) for value in (torch.zeros_like(models[0]), torch.ones_like(models[0]))
        )
        node = m.add_difference(zeros, m.subtract(ones, zeros), alpha=node)
    return run(node)


def drawn(
    shape: tuple[int, ...], seed: int, count: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def ids(method: MergeMethod) -> str:
    return method.identifier

"""A call of every method that makes a model, with arguments made up from its signature."""

from itertools import count

import torch
from method_cases import OF_ADAPTERS, OF_NETWORKS, WITH_DATA
from safetensors.torch import save_file

import mecha_exp as mx
from mecha_exp import (
    MergeMethod,
    Parameter,
    Return,
    merge_method,
    model,
)
from mecha_exp.method_api.method import Kind
from mecha_exp.method_api.registry import all_methods

SHAPES = {
    "blocks.0.weight": ((8207, 8), torch.float32),  # more than a block of a reduction, and no multiple of it
    "blocks.1.weight": ((24, 40), torch.float16),
    "blocks.2.weight": ((6, 4, 3, 3), torch.bfloat16),
    "norm.weight": ((48,), torch.float32),
    "scale": ((), torch.float32),
}
METHODS = [
    m
    for m in all_methods()
    if m.kind not in (Kind.CHOICE, Kind.FACTOR, Kind.VIEW)
    and m.signature.returned.interface is not str  # these make no model
    and m.identifier not in OF_NETWORKS | OF_ADAPTERS | WITH_DATA  # nor can these, of such tensors
]
MASKS = {"emr_mask", "tall_mask_of"}
"""Composites that give a number for each entry, and not one for the tensor."""


@merge_method(elementwise=True, register=False)
def shown(a: Parameter(torch.Tensor), value: Parameter(torch.Tensor, "param")) -> Return(torch.Tensor):
    """Makes a small value visible."""
    return torch.zeros_like(a) + value.sum()


def models_in(folder, shapes):
    """Four models, the last one a difference."""
    generator = torch.Generator().manual_seed(0)
    paths = [folder / f"{name}.safetensors" for name in ("a", "b", "c", "difference")]
    for path in paths:
        drawn = {key: torch.randn(shape, generator=generator) * 0.1 for key, (shape, _) in shapes.items()}
        save_file({key: drawn[key].to(shapes[key][1]) for key in drawn}, path)
    return list(map(str, paths))


def recipe_of(method: MergeMethod, files: list[str]) -> mx.Node:
    """A call with arguments made up from the signature."""
    numbers = count()

    def tensor(spec):
        number = next(numbers)
        if spec.spaces is None or "weight" in spec.spaces:
            return model(files[number % 3])
        return (
            model(files[3], merge_space="delta") if number % 2 else mx.subtract(files[number % 3], files[2])
        )

    given = {}
    for spec in method.signature.parameters:
        if spec.variadic:
            given[spec.name] = [tensor(spec) for _ in range(3)]
        elif spec.is_model:
            given |= {spec.name: tensor(spec)} if spec.required else {}
        elif spec.name == "steps":
            given[spec.name] = 3  # of a descent, which are all alike
        elif (spec.required or spec.default in (0, 1)) and not spec.choices and spec.check(0.3) is None:
            given[spec.name] = 0.3  # 0 and 1 often mean that nothing is to be done
        elif spec.required:
            given[spec.name] = next(c for c in (*spec.choices, "float16", 1, True) if spec.check(c) is None)
    node, problems = method.bind(given)
    assert not problems, problems
    is_small_composite = method.kind is Kind.COMPOSITE and node.merge_space == "param"
    small = method.kind is Kind.REDUCTION or (is_small_composite and method.identifier not in MASKS)
    return shown(files[0], node) if small else node

"""A tiny base model and PEFT adapters of it, written by hand: no library is needed."""

import torch
from torch import Tensor

SHAPES = {
    "model.embed_tokens.weight": (20, 6),
    "model.layers.0.q_proj.weight": (8, 6),
    "model.layers.0.q_proj.bias": (8,),
    "model.layers.0.o_proj.weight": (6, 6),
    "model.layers.1.q_proj.weight": (8, 6),
    "model.layers.1.q_proj.bias": (8,),
    "model.layers.1.o_proj.weight": (6, 6),
    "model.conv.weight": (4, 6, 3, 3),
    "model.norm.weight": (6,),
    "lm_head.weight": (20, 6),
}
"""The keys of the base."""

Q, O, HEAD = "model.layers.0.q_proj", "model.layers.0.o_proj", "lm_head"  # noqa: E741


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def lora(*modules: str, rank: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """The factors of linear modules, with PEFT's names."""
    tensors = {}
    for number, module in enumerate(modules):
        rows, columns = SHAPES[f"{module}.weight"]
        tensors[f"base_model.model.{module}.lora_A.weight"] = rand(rank, columns, seed=seed + 10 * number)
        tensors[f"base_model.model.{module}.lora_B.weight"] = rand(rows, rank, seed=seed + 10 * number + 1)
    return tensors

"""A model config of a few keys, models and LoRA files of it, and what a file adds."""

import torch
from torch import Tensor

import mecha_exp as m
from mecha_exp.architectures import resolve

BASE = """
identifier: toy-kohya
components:
  text:
    prefix: te.
    keys:
      layers.{0,1}.{q,k,v}.weight: [8, 6]
      layers.{0,1}.{q,k,v}.bias: [8]
      ids: {shape: [3], dtype: int64, optional: true}
    blocks: BASE
  diffuser:
    prefix: unet.
    keys:
      conv.{0,1}.weight: [6, 4, 3, 3]
      proj.weight: [6, 4, 1, 1]
      norm.{weight,bias}: [6]
    blocks: {"conv.{0,1}.*": "IN0{0,1}", proj.*: OUT00, norm.*: OUT00}
"""
LORA = "identifier: toy-kohya_kohya_lora\nadapter: {base: toy-kohya, prefix: lora}"
LYCORIS = "identifier: toy-kohya_lycoris_lora\nadapter: {base: toy-kohya, prefix: lycoris}"
Q, CONV, PROJ = "te.layers.0.q.weight", "unet.conv.0.weight", "unet.proj.weight"

SHARED = "down_blocks_1_attentions_0_transformer_blocks_0"
"""Diffusers' name of a layer of SD1 and of SDXL."""

StateDict = dict[str, Tensor]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def base_model(seed: int = 1) -> StateDict:
    made = {
        key: rand(*info.shape, seed=seed + i)
        for i, (key, info) in enumerate(resolve("toy-kohya").keys().items())
        if info.dtype != "int64"
    }
    return made | {"te.ids": torch.arange(3)}


def lora(module: str, **tensors: Tensor) -> StateDict:
    return {f"{module}.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}


UP, DOWN = rand(8, 2), rand(2, 6)
OF_Q = lora(
    "lora_te_layers_0_q", lora_up__weight=UP, lora_down__weight=DOWN, alpha=torch.tensor(4.0).double()
)


def added(files: StateDict, target: str = "toy-kohya") -> StateDict:
    """What the modules add, computed in float64."""
    options = m.EngineOptions(compute_dtype=torch.float64)
    return m.merge(m.convert(m.model(files), target), options=options)

"""Configs of two small networks whose units may change places, and models of them."""

import math

import torch
from state_dicts import StateDict

from mecha_exp.architectures import (
    ModelConfig,
    from_yaml,
)

MLP = from_yaml("""
identifier: chain-test
sizes: {inputs: 5, first: 12, second: 9, outputs: 3}
components:
  mlp:
    keys:
      "{0,1}.bias": {shape: [first], optional: true}
      0.weight: [first, inputs]
      1.weight: [first]
      2.weight: [second, first]
      2.bias: [second]
      3.weight: [outputs, second]
    symmetries:
      "":
        - {rows: ["0.{weight,bias}", "1.{weight,bias}"], columns: 2.weight}
        - {rows: "2.{weight,bias}", columns: 3.weight}
""")
ATTENTION = from_yaml("""
identifier: attention-test
components:
  layers:
    keys:
      "{0,1}.qkv.weight": [24, 8]
      "{0,1}.qkv.bias": [24]
      "{0,1}.out.weight": [8, 8]
      "{0,1}.norm.weight": [8]
    symmetries:
      "{0,1}":
        - {head: 4, rows: ["qkv.{weight,bias} 1/3", "qkv.{weight,bias} 2/3"]}
        - {head: 4, rows: "qkv.{weight,bias} 3/3", columns: out.weight}
""")


def tensors(keys: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float64) -> StateDict:
    generator = torch.Generator().manual_seed(seed)
    values = {key: torch.randn(shape, generator=generator).double() for key, shape in keys.items()}
    return {key: (x / math.sqrt(math.prod(x.shape[1:]))).to(dtype) for key, x in values.items()}


def drawn_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> StateDict:
    return tensors({key: info.shape for key, info in config.keys().items()}, seed, dtype)

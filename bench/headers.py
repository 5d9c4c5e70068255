"""Models of real shapes whose headers alone are real: sparse files take no room on a disk.

Llamas have the sizes of their paper (arXiv:2407.21783, table 3).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from mecha_exp.checkpoint.folder_in_place import index_content
from mecha_exp.checkpoint.safetensors.writer import Places
from mecha_exp.checkpoint.shards import Layout, pack

SHARD = 5_000_000_000
"""The bytes of a file: what transformers writes at most."""


@dataclass(frozen=True)
class Llama:
    """The sizes that decide the shapes of a Llama."""

    layers: int
    width: int
    inner: int
    heads: int
    groups: int = 8
    words: int = 128_256

    @property
    def layout(self) -> Layout:
        """The dtype and shape of each key, in the order of the file."""
        heads = self.groups * (self.width // self.heads)
        layer = {
            "input_layernorm": (self.width,),
            "mlp.down_proj": (self.width, self.inner),
            "mlp.gate_proj": (self.inner, self.width),
            "mlp.up_proj": (self.inner, self.width),
            "post_attention_layernorm": (self.width,),
            "self_attn.k_proj": (heads, self.width),
            "self_attn.o_proj": (self.width, self.width),
            "self_attn.q_proj": (self.width, self.width),
            "self_attn.v_proj": (heads, self.width),
        }
        return _layout(self.layers, layer, self.words, self.width)

    @property
    def config(self) -> dict[str, object]:
        """The part of its config.json that a merge looks at."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.groups,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.words,
        }


@dataclass(frozen=True)
class Mixture:
    """The sizes of a Qwen3 mixture of experts (arXiv:2505.09388, table 2), which has many small keys."""

    layers: int = 48
    experts: int = 128
    width: int = 2048
    inner: int = 768
    heads: int = 4096
    groups: int = 512
    words: int = 151_936

    @property
    def layout(self) -> Layout:
        """The dtype and shape of each key, in the order of the file."""
        expert = {
            "down": (self.width, self.inner),
            "gate": (self.inner, self.width),
            "up": (self.inner, self.width),
        }
        layer = {
            "input_layernorm": (self.width,),
            **{f"mlp.experts.{n}.{name}_proj": s for n in range(self.experts) for name, s in expert.items()},
            "mlp.gate": (self.experts, self.width),
            "post_attention_layernorm": (self.width,),
            "self_attn.k_norm": (128,),
            "self_attn.k_proj": (self.groups, self.width),
            "self_attn.o_proj": (self.width, self.heads),
            "self_attn.q_norm": (128,),
            "self_attn.q_proj": (self.heads, self.width),
            "self_attn.v_proj": (self.groups, self.width),
        }
        return _layout(self.layers, layer, self.words, self.width)

    @property
    def config(self) -> dict[str, object]:
        """The part of its config.json that a merge looks at."""
        return {"model_type": "qwen3_moe", "torch_dtype": "bfloat16", "vocab_size": self.words}


LLAMAS = {
    "8B": Llama(32, 4096, 14336, 32),
    "70B": Llama(80, 8192, 28672, 64),
    "405B": Llama(126, 16384, 53248, 128),
}


def _layout(layers: int, layer: Mapping[str, tuple[int, ...]], words: int, width: int) -> Layout:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, width)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (words, width)}
    return {key: ("BF16", shape) for key, shape in shapes.items()}


def write_tensors(folder: Path, llama: Llama, seed: int) -> Path:
    """Write a small model with numbers in it, as one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama.config, indent=2))
    generator = torch.Generator().manual_seed(seed)
    shapes = {key: shape for key, (_, shape) in llama.layout.items()}
    tensors = {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_headers(folder: Path, llama: Llama | Mixture, shard_size: int = SHARD) -> Path:
    """Write a model's folder of which the headers are real and the tensors are holes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama.config, indent=2))
    (package,) = pack(llama.layout, [], shard_size)
    for shard in package.shards:
        places = Places.in_safetensors(shard.tensors, {"format": "pt"})
        with (folder / shard.name).open("wb") as file:
            file.write(places.header)
            file.truncate(places.nbytes)
    if len(package.shards) > 1:
        (folder / package.index).write_bytes(index_content(package, package.files))
    return folder

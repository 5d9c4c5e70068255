"""Models of the shapes of Llama 3.1 whose headers alone are real: sparse files take no room on a disk.

The sizes are those of the Llama 3 paper (arXiv:2407.21783, table 3): layers, width, width of the feed-forward
layers, heads, and a vocabulary of 128,256 tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.words, self.width)}
        for number in range(self.layers):
            shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {"model.norm.weight": (self.width,), "lm_head.weight": (self.words, self.width)}
        return {key: ("BF16", shape) for key, shape in shapes.items()}

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


LLAMAS = {
    "8B": Llama(32, 4096, 14336, 32),
    "70B": Llama(80, 8192, 28672, 64),
    "405B": Llama(126, 16384, 53248, 128),
}


def write_headers(folder: Path, llama: Llama, shard_size: int = SHARD) -> Path:
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

"""Small diffusion transformers: the sizes of the built-in families, made small."""

import math

import torch

from mecha_exp.architectures import ModelConfig, resolve

FAMILIES = (
    *("flux", "chroma", "sd3.5_large", "sd3.5_medium", "qwen_image", "wan", "hidream", "lumina2", "pixart"),
    *("auraflow", "hunyuan_video", "ltx"),
)
FORMATS = {
    "flux": "flux-flux",
    "chroma": "chroma-flux",
    "sd3.5_large": "sd3.5_large-comfyui",
    "sd3.5_medium": "sd3.5_medium-comfyui",
    "wan": "wan-wan",
    "lumina2": "lumina2-lumina2",
    "auraflow": "auraflow-auraflow",
    "hunyuan_video": "hunyuan_video-hunyuan_video",
    "ltx": "ltx-ltx",
    "pixart": "pixart-pixart",
}
"""The format of single files, where their names differ from those of diffusers."""

DEPTHS = {"layers": 3, "singles": 2, "refiners": 2, "guidance_layers": 2, "captions": 2}
WIDTHS = {"hidden": 12, "keys": 4, "head": 4, "text": 5, "channels": 7, "pooled": 3, "feed_forward": 10}
TIMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "nine": 9}


def small(identifier: str) -> ModelConfig:
    """A member of a family with few layers and narrow ones; sizes that are multiples of others stay so."""
    config = resolve(identifier)
    return config.with_sizes({name: _size(name) for name in config.sizes})


def _size(name: str) -> int:
    word, _, rest = name.partition("_")
    if word == "third":
        return _size(rest) // 3
    return TIMES[word] * _size(rest) if word in TIMES else {**DEPTHS, **WIDTHS}.get(name, 6)


def transformer(identifier: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a small transformer, without text encoders, by the names of its format."""
    generator = torch.Generator().manual_seed(seed)
    keys = small(identifier).components()["diffuser"]
    return {
        key: torch.randn(info.shape, generator=generator) / math.sqrt(max(info.shape[-1:], default=1))
        for key, info in keys.items()
    }

"""Write what diffusers makes of single files: `python -m parity.pipelines pipelines.json`, with diffusers.

Stable Diffusion 1 and XL with all their keys, small and full of random numbers, go through diffusers' own
conversions. Of each part a hash of names, shapes and numbers is kept, which parity/test_pipelines.py
compares with the hash of ours.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mecha_exp.architectures import resolve

Tensors = dict[str, torch.Tensor]
CROSS, PLAIN = "CrossAttn{}Block2D", "{}Block2D"
FORMATS = {
    "sd1-ldm": ("sd1-diffusers", (CROSS, CROSS, CROSS, PLAIN), None),
    "sdxl-sgm": ("sdxl-diffusers", (PLAIN, CROSS, CROSS), "text_time"),
}
"""Of each single file the folder's format, the blocks of its UNet, and what that is conditioned on."""
CLIP_G = "conditioner.embedders.1.model."


def main() -> None:
    """Write the hashes."""
    found = {single: {name: digest(part) for name, part in converted(single).items()} for single in FORMATS}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def small_model(identifier: str) -> Tensors:
    """All keys of a config with every width divided by 256, so that the ratios stay."""
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randint(-999, 999, _small(info.shape), generator=generator).float()
        for key, info in resolve(identifier).keys().items()
    }


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size if size < 8 else max(1, size // 256) for size in shape)


def converted(single: str) -> dict[str, Tensors]:
    """The parts of a pipeline that diffusers makes of a single file."""
    from diffusers.loaders import single_file_utils as peer

    _, blocks, condition = FORMATS[single]
    unet = {
        "down_block_types": tuple(block.format("Down") for block in blocks),
        "up_block_types": tuple(block.format("Up") for block in reversed(blocks)),
        "layers_per_block": 2,
        "addition_embed_type": condition,
        "class_embed_type": None,
        "num_class_embeds": None,
    }
    vae = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    model = small_model(single)
    prefix = "conditioner.embedders.0.transformer." if condition else "cond_stage_model.transformer."
    parts = {
        "unet": peer.convert_ldm_unet_checkpoint(dict(model), unet),
        "vae": peer.convert_ldm_vae_checkpoint(dict(model), vae),
        "text_encoder": peer.convert_ldm_clip_checkpoint(dict(model), prefix),
    }
    if condition:
        parts["text_encoder_2"] = peer.convert_open_clip_checkpoint(_clip_g(), dict(model), CLIP_G)
    return parts


def _clip_g() -> Any:
    """What diffusers asks of the text encoder that it fills: its keys, and its width."""
    own = {key.removeprefix("text_encoder_2."): None for key in resolve("sdxl-diffusers").keys()}
    return SimpleNamespace(state_dict=lambda: own, config=SimpleNamespace(hidden_size=1280 // 256))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, shapes and numbers."""
    found = hashlib.sha256()
    for key in sorted(tensors):
        found.update(f"{key} {list(tensors[key].shape)}\n".encode())
        found.update(tensors[key].contiguous().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()

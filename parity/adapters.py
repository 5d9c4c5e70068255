"""What sd-mecha makes of LoRA files, and differences: `python -m parity.adapters FILE`, in its environment.

The modules are of the smallest layers that there are, and of large results the first rows are kept. Its own
extraction writes empty files, so the functions that it consists of are asked.
"""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROWS = 4
"""How many rows of a result are kept."""

CONFIGS = {
    "sd1-kohya_kohya_lora": ("lora_unet_conv_in", "lora_vae_quant_conv", "sd1-kohya"),
    "sd1-kohya_lycoris_lora": ("lycoris_unet_conv_in", "lycoris_vae_quant_conv", "sd1-kohya"),
    "sdxl-kohya_kohya_lora": ("lora_unet_input_blocks_0_0", "lora_first_stage_model_quant_conv", "sdxl-sgm"),
    "sdxl-kohya_lycoris_lora": (
        "lycoris_unet_input_blocks_0_0",
        "lycoris_first_stage_model_quant_conv",
        "sdxl-kohya",
    ),
    "sdxl-kohya_but_diffusers_kohya_lora": (
        "lora_unet_conv_in",
        "lora_first_stage_model_quant_conv",
        "sdxl-sgm",
    ),
    "sdxl-kohya_but_diffusers_lycoris_lora": (
        "lycoris_unet_conv_in",
        "lycoris_first_stage_model_quant_conv",
        "sdxl-kohya_but_diffusers",
    ),
}
"""For each config modules of convolutions of [320, 4, 3, 3] and [8, 8, 1, 1], and what it is converted to."""

KINDS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "lora": (
        {"lora_up.weight": (320, 2, 1, 1), "lora_down.weight": (2, 4, 3, 3), "alpha": ()},
        {"lora_up.weight": (8, 3), "lora_down.weight": (3, 8)},
    ),
    "core": (
        {
            "lora_up.weight": (320, 2, 1, 1),
            "lora_mid.weight": (2, 3, 3, 3),
            "lora_down.weight": (3, 4, 1, 1),
            "alpha": (),
        },
        {"lora_up.weight": (8, 3, 1, 1), "lora_down.weight": (3, 8, 1, 1), "alpha": ()},
    ),
    "lokr": (
        {"lokr_w1": (16, 2), "lokr_w2": (20, 2, 3, 3), "alpha": ()},
        {"lokr_w1_a": (2, 1), "lokr_w1_b": (1, 4), "lokr_w2_a": (4, 1), "lokr_w2_b": (1, 2), "alpha": ()},
    ),
    "lokr_of_products": (
        {"lokr_w1": (16, 2), "lokr_w2_a": (20, 2), "lokr_w2_b": (2, 18), "alpha": ()},
        {"lokr_w1_a": (2, 1), "lokr_w1_b": (1, 4), "lokr_w2": (4, 2, 1, 1)},
    ),
}
"""The shapes of two modules of each kind."""

DELTA = (8, 6, 3, 3)
"""The shape of a difference that is extracted."""


def files() -> dict[str, dict[str, Tensor]]:
    """LoRA files by `config|kind`, in float64."""
    generator = torch.Generator().manual_seed(29)
    return {
        f"{config}|{kind}": {
            f"{module}.{suffix}": torch.randn(shape, generator=generator, dtype=torch.float64)
            for module, shapes in zip(modules, KINDS[kind], strict=True)
            for suffix, shape in shapes.items()
        }
        for config, (*modules, _) in CONFIGS.items()
        for kind in KINDS
    }


def text(config: str) -> str:
    """The recipe of what a file of a config adds, as both write it."""
    *_, target = CONFIGS[config]
    base = config.rpartition("_")[0].rpartition("_")[0]
    lines = [
        "version 0.1.0",
        f'model "lora.safetensors" model_config="{config}" merge_space="weight"',
        f"merge \"convert_'{config}'_to_base\" &0",
    ]
    if target != base:
        lines.append(f"merge \"convert_'{base}'_to_'{target}'\" &1")
    return "\n".join(lines)


def difference() -> Tensor:
    """What is extracted."""
    return torch.randn(DELTA, generator=torch.Generator().manual_seed(31), dtype=torch.float64)


def merged(recipe: object) -> dict[str, Tensor]:
    """What sd-mecha makes of a recipe, in float64."""
    import sd_mecha

    settings = {"merge_dtype": torch.float64, "output_dtype": torch.float64, "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "merged.safetensors"
        sd_mecha.merge(recipe, strict_merge_space=None, output=path, **settings)
        return {key: tensor.clone() for key, tensor in load_file(path).items()}


def extracted() -> dict[str, Tensor]:
    """The factors that its functions find for a difference."""
    from sd_mecha.extensions import merge_methods

    method = merge_methods.resolve("extract_lora_'sd1-kohya_kohya_lora'")
    relation = SimpleNamespace(outputs=("up", "down", "alpha"))
    given = {"use_approximate_basis": False, "approximate_basis_iters": 2, "approximate_basis_seed": None}
    found = method.__wrapped__()(difference(), rank=3, **given, key_relation=relation, cache=None)
    lokr = merge_methods.resolve("extract_lokr_'sd1-kohya_kohya_lora'")
    relation = SimpleNamespace(outputs=("w1", "w2"))
    return {**found, **lokr.__wrapped__()(difference(), kronecker_ratio=0.5, key_relation=relation)}


def main(path: str) -> None:
    """Write the file."""
    import sd_mecha

    path = str(Path(path).absolute())
    golden: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, tensors in files().items():
            config = name.partition("|")[0]
            save_file(tensors, "lora.safetensors")
            recipe = sd_mecha.convert(sd_mecha.model("lora.safetensors", config), CONFIGS[config][-1])
            if sd_mecha.serialize(recipe, finalize=False) != text(config):
                raise ValueError(f"another text: {sd_mecha.serialize(recipe, finalize=False)}")
            made = merged(sd_mecha.deserialize(text(config)))
            golden |= {f"{name}|{key}": tensor[:ROWS].contiguous() for key, tensor in made.items()}
        os.chdir(Path(path).parent)
    golden |= {f"extracted|{name}": tensor.contiguous() for name, tensor in extracted().items()}
    save_file(golden, path, {"oracle": "sd-mecha"})
    sys.stdout.write(f"{len(files())} LoRA files in {path}\n")


if __name__ == "__main__":
    import sd_mecha

    sd_mecha.set_log_level("ERROR")
    main(sys.argv[1])

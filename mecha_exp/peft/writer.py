"""Writes adapters of PEFT: the folder, and the entries of its configuration about ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mecha_exp.checkpoint.folder import ADAPTER_CONFIG, ADAPTER_STEM
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.errors import CheckpointError
from mecha_exp.system.atomic_write import atomic_write


def require_adapter_folder(output: Path) -> None:
    """Raise CheckpointError where a path is in use for something other than an adapter."""
    if output.is_file() or (
        output.is_dir() and any(output.iterdir()) and not (output / ADAPTER_CONFIG).is_file()
    ):
        raise CheckpointError(f"{output} is there and is not an adapter: name another folder.")


def config_of_ranks(ranks: Mapping[str, int]) -> dict[str, Any]:
    """The entries that give each module its rank and the scale 1."""
    common = max(ranks.values(), key=list(ranks.values()).count)
    others = {re.escape(module): rank for module, rank in ranks.items() if rank != common}
    return {
        "r": common,
        "lora_alpha": common,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
    }


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write the folder of an adapter, or leave what was there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            atomic_write(folder / ADAPTER_CONFIG) as config_file,
            atomic_write(folder / f"{ADAPTER_STEM}{SUFFIX}") as weights_file,
        ):
            save_file(dict(tensors), weights_file, metadata={"format": "pt"})
            config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}.") from None

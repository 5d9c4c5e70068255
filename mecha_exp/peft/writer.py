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

from mecha_exp.checkpoint.folder import ADAPTER_STEM
from mecha_exp.checkpoint.model import ADAPTER_CONFIG
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.checkpoint.transaction.small_folder import is_begun, is_leftover, replaced_together
from mecha_exp.errors import CheckpointError


def require_adapter_folder(output: Path) -> None:
    """Raise CheckpointError where a path is in use for something other than an adapter."""
    if not output.exists() or (output / ADAPTER_CONFIG).is_file() or is_begun(output):
        return
    if not output.is_dir() or not all(map(is_leftover, output.iterdir())):
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
    """Write the weights and the configuration of an adapter in one step, or leave what was there."""
    with replaced_together(folder, ADAPTER_CONFIG) as staged:
        try:
            save_file(dict(tensors), staged / f"{ADAPTER_STEM}{SUFFIX}", metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"{folder} cannot be written: {error}.") from None
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (staged / ADAPTER_CONFIG).write_text(text, encoding="utf-8")

"""An adapter of PEFT in words and as plain data, without its base."""

from __future__ import annotations

from typing import Any

from mecha_exp.checkpoint.model import ADAPTER_CONFIG
from mecha_exp.errors import CheckpointError, counted
from mecha_exp.peft.config import LOHA, LOKR, LORA, PeftConfig, read_config
from mecha_exp.peft.modules import MAGNITUDE, sorted_modules
from mecha_exp.sources.source import Source


def described(source: Source) -> dict[str, Any] | None:
    """What an adapter is, and why it cannot be read if so; None for any other source."""
    if source.path is None or not source.is_adapter:
        return None
    try:
        config = read_config(source.path)
        factors, whole = sorted_modules(source.keys(), str(source.path))
    except CheckpointError as error:
        return {"kind": "of PEFT", "fault": str(error)}
    has_magnitudes = any(MAGNITUDE in suffixes for suffixes in factors.values())
    return {
        "kind": "DoRA" if has_magnitudes else _name_of(config),
        "base": config.base,
        "modules": len(factors),
        "ranks": sorted({config.rank_of(module) for module in factors}),
        "scales": sorted({config.scale_of(module) for module in factors}),
        "whole": sorted(whole),
        "fault": "",
    }


def sentence(data: dict[str, Any]) -> str:
    """One line about an adapter."""
    if data["fault"]:
        return f"an adapter that cannot be merged: {data['fault']}"
    ranks, scales = (" or ".join(f"{number:.6g}" for number in data[name]) for name in ("ranks", "scales"))
    words = [f"a {data['kind']} adapter of PEFT ({ADAPTER_CONFIG})"]
    words += [f"trained on {data['base']}"] if data["base"] else []
    words.append(
        f"{counted(data['modules'], 'module')} of rank {ranks}, times {scales}" if ranks else "no modules"
    )
    words += [counted(len(data["whole"]), "whole tensor")] if data["whole"] else []
    return ", ".join(words)


def _name_of(config: PeftConfig) -> str:
    names = {LORA: "rsLoRA" if config.is_rank_stabilised else "LoRA", LOHA: "LoHa", LOKR: "LoKr"}
    return names[config.kind]

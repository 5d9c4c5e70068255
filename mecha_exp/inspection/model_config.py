"""A model config as data and as tables: components, blocks, keys, and what it converts to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mecha_exp.architectures import DEFAULT_CONVENTION, AdapterConfig, KeyInfo, ModelConfig, targets_of
from mecha_exp.architectures.lora import ANY_SHAPE
from mecha_exp.errors import counted
from mecha_exp.terminal.console import make_table, print_line, stdout


def summary_of(config: ModelConfig) -> dict[str, Any]:
    """A config as plain data, without details."""
    return {
        "identifier": config.identifier,
        "components": list(config.components()),
        "keys": len(config.keys()),
        "parameters": sum(_size(info) for info in config.keys().values() if not info.optional),
        "blocks": len(config.blocks()),
        "sizes": config.sizes,
    }


def describe_config(config: ModelConfig, verbose: bool = False) -> dict[str, Any]:
    """A config as plain data: components, blocks in each convention and, when verbose, keys."""
    data = summary_of(config)
    data["components"] = {name: _component(keys) for name, keys in config.components().items()}
    data["blocks"] = {name: list(config.blocks(name)) for name in config.conventions}
    data["moved"] = {
        name: {
            key: config.block_of(key, name)
            for key in config.keys()
            if config.block_of(key, name) != config.block_of(key)
        }
        for name in config.conventions
        if name != DEFAULT_CONVENTION
    }
    data["converts_to"] = targets_of(config)
    if isinstance(config, AdapterConfig):
        data["adds_to"] = config.base.identifier
    if verbose:
        data["all_keys"] = {
            key: {
                "shape": list(info.shape),
                "dtype": info.dtype,
                "block": config.block_of(key),
                "optional": info.optional,
            }
            for key, info in config.keys().items()
        }
    return data


def _component(keys: Mapping[str, KeyInfo]) -> dict[str, int]:
    return {
        "keys": len(keys),
        "optional": sum(info.optional for info in keys.values()),
        "parameters": sum(map(_size, keys.values())),
    }


def _size(info: KeyInfo) -> int:
    """The number of elements of a key; 0 where any shape is allowed."""
    return 0 if info.shape == ANY_SHAPE else math.prod(info.shape)


def show_configs(data: Mapping[str, Any]) -> None:
    """Print the list of configs as a table."""
    rows = make_table("model config", "components", "keys", "parameters", "blocks")
    for config in data["configs"]:
        family = " (any size)" if config["sizes"] else ""
        rows.add_row(
            config["identifier"] + family,
            ", ".join(config["components"]),
            f"{config['keys']:,}",
            human_count(config["parameters"]),
            str(config["blocks"]),
        )
    stdout.print(rows)


def show_config(data: Mapping[str, Any]) -> None:
    """Print a config as tables."""
    stdout.print(
        f"{data['identifier']}: {counted(data['keys'], 'key')}, {human_count(data['parameters'])} parameters"
    )
    if "adds_to" in data:
        stdout.print(f"LoRA modules of any rank, which add to the tensors of {data['adds_to']}")
    if data["sizes"]:
        sizes = ", ".join(f"{name} {size:,}" for name, size in data["sizes"].items())
        stdout.print(f"of any size; by default {sizes}")
    rows = make_table("component", "keys", "optional", "parameters")
    for name, part in data["components"].items():
        rows.add_row(name, f"{part['keys']:,}", f"{part['optional']:,}", human_count(part["parameters"]))
    stdout.print(rows)
    print_line(f"blocks: {' '.join(data['blocks'][DEFAULT_CONVENTION])}")
    for name, moved in data["moved"].items():
        counts = ", ".join(f"{block} has {count}" for block, count in Counter(moved.values()).items())
        print_line(f"convention {name}: {counts} keys more, such as {next(iter(moved))}")
    print_line(f"converts to: {', '.join(data['converts_to']) or 'nothing else'}")
    if "all_keys" in data:
        keys = make_table("key", "shape", "dtype", "block", "")
        for key, info in data["all_keys"].items():
            shape = "×".join("any" if size < 0 else str(size) for size in info["shape"]) or "scalar"
            keys.add_row(key, shape, info["dtype"], info["block"], "optional" if info["optional"] else "")
        stdout.print(keys)


def human_count(count: float) -> str:
    """A number of parameters as text for people, as in `2.57 B`."""
    for unit in ("", " k", " M"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} B"

"""`python -m mecha_exp info`: the known model configs, one of them, or what a model is."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mecha_exp.architectures import (
    DEFAULT_CONVENTION,
    AdapterConfig,
    Detection,
    KeyInfo,
    ModelConfig,
    candidates,
    closest,
    detect,
    get_all,
    get_all_adapters,
    resolve,
    targets_of,
)
from mecha_exp.architectures.lora import ANY_SHAPE
from mecha_exp.checkpoint import StateDictSource, is_arithmetic, open_stored, torch_dtype
from mecha_exp.errors import CheckpointError, ConfigError, MechaError, did_you_mean, some
from mecha_exp.inspection import methods
from mecha_exp.inspection.recipe_tree import tree_of
from mecha_exp.plugins import load_model_configs
from mecha_exp.recipe import deserialize
from mecha_exp.recipe.files import METADATA_KEY
from mecha_exp.sources.search import find_model
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal import make_table, stdout

EXAMPLE = """\
examples:
    python -m mecha_exp info                          the model configs
    python -m mecha_exp info sdxl-sgm -v              one of them, with its keys
    python -m mecha_exp info model.safetensors        what a model is, by its header
    python -m mecha_exp info model.safetensors --deep    and whether its numbers are finite
    python -m mecha_exp info methods [NAME]           the merge methods, or one of them
"""

LONGEST_RECIPE = 12
"""So many lines of a recipe are shown; `show` has all."""


def main(arguments: list[str]) -> int:
    """Print what is known of the configs, of a config, of a model, or of merge methods."""
    if arguments[:1] == ["methods"]:
        return methods.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m mecha_exp info",
        description="Say what model configs there are, what is in one, or what a model is.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", nargs="?", help="a model config, a file or a folder; nothing lists the configs"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="with every key")
    parser.add_argument("--json", action="store_true", help="as JSON, for other programs")
    parser.add_argument("--deep", action="store_true", help="read all of a model for NaN and infinity")
    parser.add_argument(
        "--models-dir",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="where models are looked for",
    )
    options = parser.parse_args(arguments)
    load_model_configs()
    if options.what is None:
        data, show = (
            {"configs": [summary_of(config) for config in (*get_all(), *get_all_adapters())]},
            show_configs,
        )
    elif (config := _config_named(options)) is not None:
        data, show = describe_config(config, options.verbose), show_config
    else:
        data, show = _model(options), show_model
    if options.json:
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        show(data)
    return 0


def summary_of(config: ModelConfig) -> dict[str, Any]:
    """A config in short."""
    return {
        "identifier": config.identifier,
        "components": list(config.components()),
        "keys": len(config.keys()),
        "parameters": sum(_numbers(info) for info in config.keys().values() if not info.optional),
        "blocks": len(config.blocks()),
        "sizes": config.sizes,
    }


def describe_config(config: ModelConfig, verbose: bool = False) -> dict[str, Any]:
    """All of a config: its components, its blocks in each convention and, when verbose, its keys."""
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


def describe_model(model: StateDictSource, deep: bool = False) -> dict[str, Any]:
    """What a model is: its config, its components, and what is odd about it."""
    infos = {key: model.info(key) for key in model.keys()}
    anomalies: list[str] = []
    found = _detected(infos, anomalies)
    config = found.config
    names = {key: found.renamed.get(key, key) for key in infos}
    parts: dict[str, list[str]] = {}
    for key, name in names.items():
        part = config.component_of(name) if name in config.keys() else "(unknown)"
        parts.setdefault(part, []).append(key)
    components = {
        part: {
            "keys": len(keys),
            "parameters": sum(infos[key].numel for key in keys),
            "bytes": sum(infos[key].nbytes for key in keys),
            "dtypes": dict(Counter(infos[key].dtype for key in keys)),
        }
        for part, keys in parts.items()
    }
    blocks = {config.block_of(name) for name in names.values() if name in config.keys()}
    anomalies += _odd(infos, found)
    if deep:
        anomalies += _nonfinite(model)
    return {
        "path": str(model.path),
        "config": config.identifier if found.is_known else None,
        "sizes": config.sizes,
        "keys": len(infos),
        "bytes": sum(info.nbytes for info in infos.values()),
        "components": components,
        "absent": list(found.absent),
        "missing": list(found.missing),
        "extra": list(found.extra),
        "renamed": len(found.renamed),
        "blocks": [block for block in config.blocks() if block in blocks],
        "recipe": model.metadata.get(METADATA_KEY),
        "anomalies": anomalies,
    }


def _config_named(options: argparse.Namespace) -> ModelConfig | None:
    """The config of that name; a model of the same name comes first, and neither is an error."""
    try:
        find_model(options.what, options.models_dir)
    except CheckpointError:
        known = [config.identifier for config in (*get_all(), *get_all_adapters())]
        if options.what in known or options.what in {name.partition("-")[0] for name in known}:
            return resolve(options.what)
        if not Path(options.what).suffix and "/" not in options.what:
            raise ConfigError(
                f"{options.what!r} is neither a model config nor a model.{did_you_mean(options.what, known)}"
            ) from None
    return None


def _model(options: argparse.Namespace) -> dict[str, Any]:
    with open_stored(find_model(options.what, options.models_dir)) as model:
        return describe_model(model, options.deep)


def _detected(infos: Mapping[str, Any], anomalies: list[str]) -> Detection:
    try:
        return detect(infos)
    except ConfigError as error:
        anomalies.append(str(error))
        return candidates(infos)[0]


def _component(keys: Mapping[str, KeyInfo]) -> dict[str, int]:
    return {
        "keys": len(keys),
        "optional": sum(info.optional for info in keys.values()),
        "parameters": sum(map(_numbers, keys.values())),
    }


def _numbers(info: KeyInfo) -> int:
    """How many a key has; none where files have as many as they like."""
    return 0 if info.shape == ANY_SHAPE else math.prod(info.shape)


def _odd(infos: Mapping[str, Any], found: Detection) -> list[str]:
    odd = [] if found.is_known else list(_nearly(infos))
    if found.missing:
        odd.append(f"{len(found.missing)} keys are missing: {some(found.missing, 3)}")
    if found.extra:
        odd.append(f"{len(found.extra)} keys do not belong to it: {some(found.extra, 3)}")
    empty = [key for key, info in infos.items() if info.numel == 0]
    if empty:
        odd.append(f"{len(empty)} tensors are empty: {some(empty, 3)}")
    return odd


def _nearly(infos: Mapping[str, Any]) -> Iterator[str]:
    """What keeps a model of no known config from being of the nearest."""
    near = closest(infos)
    if near is None:
        return
    differences = [
        f"{key} is {list(own)} instead of {list(wanted)}" for key, (own, wanted) in near.other_shape.items()
    ]
    parts = [some(differences, 3)] if differences else []
    parts += [f"{len(near.missing)} keys are missing: {some(near.missing, 3)}"] if near.missing else []
    parts += [f"{len(near.extra)} keys are others: {some(near.extra, 3)}"] if near.extra else []
    yield f"nearly {near.config.identifier}, but {'; '.join(parts)}"


def _nonfinite(model: StateDictSource) -> list[str]:
    """The tensors with NaN or infinity in them, read one after the other."""
    bad = []
    for key in model.keys():
        if is_arithmetic(model.info(key).dtype) and torch_dtype(model.info(key).dtype) is not None:
            count = int((~model.read(key).float().isfinite()).sum())
            if count:
                bad.append(f"{key} ({count:,})")
    return [f"NaN or infinity in {len(bad)} tensors: {some(bad, 5)}"] if bad else []


def show_configs(data: Mapping[str, Any]) -> None:
    """The list of configs as a table."""
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
    """A config as tables."""
    stdout.print(f"{data['identifier']}: {data['keys']:,} keys, {human_count(data['parameters'])} parameters")
    if "adds_to" in data:
        stdout.print(f"LoRA modules of any rank, which add to the tensors of {data['adds_to']}")
    if data["sizes"]:
        sizes = ", ".join(f"{name} {size:,}" for name, size in data["sizes"].items())
        stdout.print(f"of any size; by default {sizes}")
    rows = make_table("component", "keys", "optional", "parameters")
    for name, part in data["components"].items():
        rows.add_row(name, f"{part['keys']:,}", f"{part['optional']:,}", human_count(part["parameters"]))
    stdout.print(rows)
    stdout.print(f"blocks: {' '.join(data['blocks'][DEFAULT_CONVENTION])}", soft_wrap=True)
    for name, moved in data["moved"].items():
        places = ", ".join(f"{block} has {count}" for block, count in Counter(moved.values()).items())
        stdout.print(f"convention {name}: {places} keys more, such as {next(iter(moved))}", soft_wrap=True)
    stdout.print(f"converts to: {', '.join(data['converts_to']) or 'nothing else'}", soft_wrap=True)
    if "all_keys" in data:
        keys = make_table("key", "shape", "dtype", "block", "")
        for key, info in data["all_keys"].items():
            shape = "×".join("any" if size < 0 else str(size) for size in info["shape"]) or "scalar"
            keys.add_row(key, shape, info["dtype"], info["block"], "optional" if info["optional"] else "")
        stdout.print(keys)


def show_model(data: Mapping[str, Any]) -> None:
    """What a model is, as tables."""
    sizes = ", ".join(f"{name} {size:,}" for name, size in data["sizes"].items())
    what = data["config"] or "of no known model config: its components and blocks are those of its names"
    stdout.print(f"{data['path']}: {what}{f' ({sizes})' if sizes else ''}", markup=False, soft_wrap=True)
    rows = make_table("component", "keys", "parameters", "size", "dtypes")
    for name, part in data["components"].items():
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in part["dtypes"].items())
        parameters = human_count(part["parameters"])
        rows.add_row(name, f"{part['keys']:,}", parameters, human_bytes(part["bytes"]), dtypes)
    stdout.print(rows)
    stdout.print(f"blocks: {' '.join(data['blocks'])}", markup=False, soft_wrap=True)
    if data["absent"]:
        stdout.print(f"without: {', '.join(data['absent'])}", markup=False)
    if data["recipe"]:
        stdout.print("merged, by this recipe:")
        for line in _recipe_lines(data["recipe"], data["path"]):
            stdout.print(f"  {line}", markup=False, soft_wrap=True)
    for anomaly in data["anomalies"]:
        stdout.print(f"odd: {anomaly}", markup=False, soft_wrap=True)


def _recipe_lines(text: str, path: str) -> list[str]:
    """The recipe that a model carries, as a tree; where it is long or of unknown methods how to see it."""
    try:
        lines = list(tree_of(deserialize(text)))
    except MechaError:
        lines = text.splitlines()
    shown = lines[:LONGEST_RECIPE]
    more = len(lines) - len(shown)
    return [*shown, f"... {more} lines more: python -m mecha_exp show {path}"] if more else shown


def human_count(count: float) -> str:
    """A number of parameters for people: 2.57 B."""
    for unit in ("", " k", " M"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} B"

"""A model as data and as tables: its config, components, recipe, and anomalies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mecha_exp.architectures import Detection, ModelConfig, candidates, closest, detect
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.architectures.keys import is_stack
from mecha_exp.checkpoint import StateDictSource, TensorInfo, is_arithmetic, torch_dtype
from mecha_exp.checkpoint.model import ADAPTER_CONFIG
from mecha_exp.checkpoint.quantisation import quantisation_of
from mecha_exp.errors import CheckpointError, ConfigError, MechaError, counted, some
from mecha_exp.inspection.model_config import human_count
from mecha_exp.inspection.recipe_tree import tree_of
from mecha_exp.recipe import deserialize
from mecha_exp.recipe.files import METADATA_KEY
from mecha_exp.sources.quantised.view import OPTION, DequantisedSource, dequantised, with_plain_keys
from mecha_exp.sources.readers import readers_of
from mecha_exp.sources.source import infos_of
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal.console import as_typed, make_table, print_line, stdout

LONGEST_RECIPE = 12
"""The number of lines of a recipe that are shown; the verb `show` prints all."""


def describe_model(model: StateDictSource, deep: bool = False) -> dict[str, Any]:
    """A model as plain data: its config, components, blocks, recipe, and anomalies."""
    infos = _infos_of(model)
    anomalies: list[str] = []
    detection = _detected(infos, anomalies)
    config = detection.config
    names = {key: detection.renamed.get(key, key) for key in infos}
    anatomy = Anatomy({name: infos[key] for key, name in names.items()}, config)
    placed = {*anatomy.keys} - {*anatomy.unplaced}
    blocks = {anatomy.blocks[name] for name in placed}
    if (quantisation := quantisation_of(model)) is not None:
        anomalies.append(f"quantised: {quantisation}. {_reading_of(model)}")
    more = [key for key in detection.extra if names[key] in placed]
    anomalies += _anomalies(infos, detection, more)
    stacked = _stacked(infos, names, config, anomalies)
    if deep:
        anomalies += _nonfinite(model)
    return {
        "path": model.name,
        "config": config.identifier if detection.is_known else None,
        "sizes": config.sizes,
        "keys": len(infos),
        "bytes": sum(model.info(key).nbytes for key in model.keys()),
        "components": _components(infos, {key: _part(anatomy, name) for key, name in names.items()}),
        "absent": list(detection.absent),
        "missing": list(detection.missing),
        "stacked": stacked,
        "extra": list(detection.extra),
        "placed": more,
        "renamed": len(detection.renamed),
        "blocks": [block for block in config.blocks() if block in blocks],
        "recipe": model.metadata.get(METADATA_KEY),
        "adapter": _adapter(model),
        "anomalies": anomalies,
    }


def _adapter(model: StateDictSource) -> Mapping[str, Any] | None:
    """What an adapter is, by the reader that knows it; None for a model."""
    return next((data for reader in readers_of([model]) if (data := reader.describe(model))), None)


def _sentence(data: Mapping[str, Any]) -> str:
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


def _part(anatomy: Anatomy, name: str) -> str:
    """The component of a key."""
    return "(unknown)" if name in anatomy.unplaced else anatomy.components[name]


def _components(infos: Mapping[str, TensorInfo], part_of: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The sizes and dtypes of each component."""
    parts: dict[str, list[str]] = {}
    for key, part in part_of.items():
        parts.setdefault(part, []).append(key)
    return {
        part: {
            "keys": len(keys),
            "parameters": sum(infos[key].numel for key in keys),
            "bytes": sum(infos[key].nbytes for key in keys),
            "dtypes": dict(Counter(infos[key].dtype for key in keys)),
        }
        for part, keys in parts.items()
    }


def _stacked(
    infos: Mapping[str, TensorInfo], names: Mapping[str, str], config: ModelConfig, anomalies: list[str]
) -> dict[str, int]:
    """How many experts each stack has; keys that may be stacks are an anomaly."""
    known = config.keys()
    stacks = {key: is_stack(key, infos[key].shape, known.get(name)) for key, name in names.items()}
    if doubtful := [key for key, is_marked in stacks.items() if is_marked is None]:
        count = counted(len(doubtful), "key looks", "keys look")
        anomalies.append(
            f"{count} like several experts in one tensor, and no model config says whether that is so: "
            f"{some(doubtful, 3)}"
        )
    return {key: infos[key].shape[0] for key, is_marked in stacks.items() if is_marked}


def _infos_of(model: StateDictSource) -> dict[str, TensorInfo]:
    """The tensors of the plain model, with the dtypes and sizes in which they are stored."""
    infos = infos_of(plain := with_plain_keys(model))
    if isinstance(plain, DequantisedSource):
        for key, tensor in plain.layout.tensors.items():
            size = sum(model.info(stored).nbytes for stored in tensor.keys)
            infos[key] = TensorInfo(model.info(tensor.keys[0]).dtype, tensor.shape, 0, size)
    return infos


def _reading_of(model: StateDictSource) -> str:
    """Whether a quantised model can be merged, and how."""
    try:
        dequantised(model)
    except CheckpointError as error:
        return "It cannot be read" + str(error).rpartition("It cannot be read")[2]
    return as_typed(OPTION)


def _detected(infos: Mapping[str, Any], anomalies: list[str]) -> Detection:
    try:
        return detect(infos)
    except ConfigError as error:
        anomalies.append(str(error))
        return candidates(infos)[0]


def _anomalies(infos: Mapping[str, Any], detection: Detection, placed: Sequence[str]) -> list[str]:
    """What is odd; keys beside those of the config that lie in its layers are not."""
    anomalies = [] if detection.is_known else list(_nearest_config(infos))
    if missing := detection.missing:
        anomalies.append(f"{counted(len(missing), 'key is', 'keys are')} missing: {some(missing, 3)}")
    if extra := [key for key in detection.extra if key not in placed]:
        anomalies.append(f"{counted(len(extra), 'key does', 'keys do')} not belong to it: {some(extra, 3)}")
    empty = [key for key, info in infos.items() if info.numel == 0]
    if empty:
        anomalies.append(f"{counted(len(empty), 'tensor is', 'tensors are')} empty: {some(empty, 3)}")
    return anomalies


def _nearest_config(infos: Mapping[str, Any]) -> Iterator[str]:
    """The differences between a model of unknown config and the nearest config."""
    near = closest(infos)
    if near is None:
        return
    differences = [
        f"{key} is {list(actual)} instead of {list(expected)}"
        for key, (actual, expected) in near.other_shape.items()
    ]
    parts = [some(differences, 3)] if differences else []
    if near.missing:
        parts.append(f"{counted(len(near.missing), 'key is', 'keys are')} missing: {some(near.missing, 3)}")
    if near.extra:
        parts.append(f"{counted(len(near.extra), 'key does', 'keys do')} not match: {some(near.extra, 3)}")
    yield f"nearly {near.config.identifier}, but {'; '.join(parts)}"


def _nonfinite(model: StateDictSource) -> list[str]:
    """The tensors that contain NaN or infinity; the model is read tensor by tensor."""
    tensors = []
    for key in model.keys():
        if is_arithmetic(model.info(key).dtype) and torch_dtype(model.info(key).dtype) is not None:
            count = int((~model.read(key).float().isfinite()).sum())
            if count:
                tensors.append(f"{key} ({count:,})")
    return [f"NaN or infinity in {counted(len(tensors), 'tensor')}: {some(tensors, 5)}"] if tensors else []


def show_model(data: Mapping[str, Any]) -> None:
    """Print a model as tables."""
    sizes = ", ".join(f"{name} {size:,}" for name, size in data["sizes"].items())
    unknown = "of no known model config: its components and blocks are those of its names"
    what = data["config"] or (_sentence(data["adapter"]) if data["adapter"] else unknown)
    print_line(f"{data['path']}: {what}{f' ({sizes})' if sizes else ''}")
    rows = make_table("component", "keys", "parameters", "size", "dtypes")
    for name, part in data["components"].items():
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in part["dtypes"].items())
        parameters = human_count(part["parameters"])
        rows.add_row(name, f"{part['keys']:,}", parameters, human_bytes(part["bytes"]), dtypes)
    stdout.print(rows)
    print_line(f"blocks: {' '.join(data['blocks'])}")
    if data["placed"]:
        keys = counted(len(data["placed"]), "more key", "more keys")
        print_line(f"its layers have {keys} than {data['config']} lists: {some(data['placed'], 3)}")
    if data["stacked"]:
        counts = " or ".join(map(str, sorted(set(data["stacked"].values()))))
        keys = counted(len(data["stacked"]), "key holds", "keys hold")
        line = f"{keys} {counts} experts each: {some(list(data['stacked']), 3)}"
        print_line(f"stacked: {line}")
    if data["absent"]:
        stdout.print(f"without: {', '.join(data['absent'])}", markup=False)
    if data["recipe"]:
        stdout.print("merged, by this recipe:")
        for line in _recipe_lines(data["recipe"], data["path"]):
            print_line(f"  {line}")
    for anomaly in data["anomalies"]:
        print_line(f"odd: {anomaly}")


def _recipe_lines(text: str, path: str) -> list[str]:
    """The first lines of a recipe's tree, or of its text if it cannot be read; and how to see the rest."""
    try:
        lines = list(tree_of(deserialize(text)))
    except MechaError:
        lines = text.splitlines()
    shown = lines[:LONGEST_RECIPE]
    more = len(lines) - len(shown)
    return [*shown, f"... {counted(more, 'line')} more: python -m mecha_exp show {path}"] if more else shown

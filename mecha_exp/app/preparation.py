"""Prepares grid points: resolves a configuration, checks it and builds its recipe."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mecha_exp.app.outputs.makers import output_maker
from mecha_exp.app.point import NAMES, SECTIONS, Point
from mecha_exp.app.recipes.templates import build_filled
from mecha_exp.app.words.plain_data import as_written, filled
from mecha_exp.app.words.typed_names import in_typed_names
from mecha_exp.checkpoint import INDEX, parse_size
from mecha_exp.checkpoint.remote import is_address, keep_in
from mecha_exp.documents import DocumentError, typed
from mecha_exp.engine import EngineOptions
from mecha_exp.engine.planner.by_key import parse_output_dtype
from mecha_exp.engine.planner.plan import check_quantize
from mecha_exp.errors import CheckpointError, ConfigError, MechaError, did_you_mean, prefixed
from mecha_exp.graph.by_key import PATTERNS
from mecha_exp.graph.nodes import InMemory, Node, call, models_of
from mecha_exp.numbers import is_number
from mecha_exp.sources.search import find_model, folders_of


@dataclass
class _Models:
    """What a configuration's `models` must be, but for the models themselves."""

    dir: str | None = None
    cache: str | None = None
    sets: list[list[Any]] | None = None


@dataclass
class _Tracking:
    """What a configuration's `tracking` must be."""

    uri: str | None = None
    experiment: str | None = None


@dataclass
class _Settings:
    """What the keys of a configuration must be that nothing else checks."""

    models: _Models | None = None
    engine: dict[str, Any] | None = None
    blocks: dict[Any, Any] | None = None  # whose names may be numbers
    output: dict[str, Any] | None = None
    evaluator: dict[str, Any] | None = None
    tracking: _Tracking | None = None
    sweep: dict[str, Any] | None = None
    hub: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    store: str | None = None


def resolve(cfg: DictConfig, written: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration without the `hydra` section, all references resolved.

    Args:
        cfg: the configuration.
        written: the same as plain data, where it is at hand; see `Composed`.

    Raises:
        ConfigError: a dangling reference, a mandatory value is missing, or a value has another type.
    """
    try:
        written = dict(written or as_written(cfg))
        cfg = with_paths(cfg, written)
        config = _normal({str(key): _resolved(cfg, str(key), written) for key in cfg if key != "hydra"})
        check_types(config)
        return config
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        message = str(error).splitlines()[0]
        if isinstance(error, MissingMandatoryValue):
            raise ConfigError(
                f"{key}no value is given, and there is no default. Type {error.full_key}=..."
            ) from None
        if "${models.experts" in message or "models.experts" in str(error):
            message += ". The recipe needs more experts than models.experts lists"
        if "'statistics." in message:
            message += (
                ". The recipe needs a file of statistics for each expert: python -m mecha_exp calibrate "
                "EXPERT data=FILE kind=KIND output=FILE.safetensors"
            )
        raise ConfigError(f"{key}{message}.") from None


def check_types(config: Mapping[str, Any]) -> None:
    """Check the types of what no group and no method checks.

    Raises:
        ConfigError: a value has another type.
    """
    try:
        typed(dict(config), _Settings, foreign=True)
    except DocumentError as error:
        raise ConfigError(f"{re.sub(': (?!expected)', '.', str(error), count=1)}.") from None


_PATHS = ("base", "experts", "sets", "dir", "cache")


def with_paths(cfg: DictConfig, written: dict[str, Any]) -> DictConfig:
    """The configuration with models that YAML takes for numbers, such as a folder `100`, as paths.

    Args:
        cfg: the configuration.
        written: the same as plain data, in which paths become texts as well.
    """
    models, store = written["models"], written.get("store")
    if not isinstance(models, dict):
        return cfg
    paths = {name: _as_paths(models[name]) for name in _PATHS if name in models}
    if all(models[name] == value for name, value in paths.items()) and not is_number(store):
        return cfg
    changed = copy.deepcopy(cfg)
    with open_dict(changed):
        changed.models.update(paths)
        changed.store = _as_paths(store)
    written |= {"models": as_written(changed.models), "store": changed.store}
    return changed


def _as_paths(value: Any) -> Any:
    """A value with texts for the numbers in it."""
    if isinstance(value, list):
        return [_as_paths(item) for item in value]
    return str(value) if is_number(value) else value


def _normal(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which a plugin alone is a list of one, and patterns stand among the blocks."""
    if isinstance(plugin := config.get("plugins"), str):
        config["plugins"] = [plugin]
    blocks = config.get("blocks")
    if isinstance(blocks, dict) and isinstance(blocks.get(PATTERNS), dict):
        config["blocks"] = {**{k: v for k, v in blocks.items() if k != PATTERNS}, **blocks[PATTERNS]}
    return config


def _resolved(cfg: DictConfig, key: str, written: Mapping[str, Any]) -> Any:
    try:
        return filled(written[key], written)
    except (LookupError, RecursionError):
        value = cfg[key]
    if not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def prepare_job(config: DictConfig, folder: Path, written: Mapping[str, Any] | None = None) -> Point:
    """`prepare` for the configuration of a job; errors name arguments as they are typed.

    Args:
        config: of the job.
        folder: of its run.
        written: the configuration as plain data, where it is at hand; see `Composed`.

    Raises:
        MechaError: as `resolve` and `prepare` raise it.
    """
    resolved = resolve(config, written)
    try:
        return prepare(resolved, folder)
    except MechaError as error:
        raise type(error)(in_typed_names(str(error), config)) from None


def prepare(config: dict[str, Any], folder: Path) -> Point:
    """Check a configuration and build its recipe; opens no model.

    Args:
        config: the result of `resolve`.
        folder: the folder of the run; the model goes there unless output.path is set, as a folder of its own
            if the first input is one.

    Raises:
        ConfigError: an invalid engine or output setting.
        RecipeError: everything that is wrong with the recipe.
    """
    models = config["models"]
    with prefixed("models.cache_size: "):
        keep_in(models.get("cache"), parse_size(models["cache_size"]) if models.get("cache_size") else None)
    options = _options(config["engine"], folders_of(config))
    recipe = build_filled(config, options.model_dirs, (*SECTIONS, *NAMES))
    if config["output"].get("prune"):
        recipe = call("omit_component", recipe, component="ema")
    return _with_output(config, folder, recipe, options)


def _options(engine: Mapping[str, Any], folders: list[Path]) -> EngineOptions:
    settings = [name for name in EngineOptions.__dataclass_fields__ if name != "model_dirs"]
    for name in engine:
        if name not in settings:
            raise ConfigError(f"engine.{name}: there is no such setting.{did_you_mean(name, settings)}")
    with prefixed("engine."):
        options = EngineOptions(**engine, model_dirs=folders)
    if options.task is not None:
        raise ConfigError(
            "engine.task: a run measures and records a whole model. Single tasks are made by the verb merge: "
            "python -m mecha_exp merge RECIPE.mecha engine.across=... engine.task=... -o FOLDER"
        )
    return options


def _with_output(config: dict[str, Any], folder: Path, recipe: Node, options: EngineOptions) -> Point:
    """The point of a recipe, with what its output is and where it goes."""
    output, path = config["output"], None
    with prefixed("output.dtype: "):
        dtype = parse_output_dtype(output["dtype"])
    with prefixed("output.shard_size: "):
        shard_size = None if output.get("shard_size") is None else parse_size(output["shard_size"])
    _require_on_disk(output["path"])
    adapter = output_maker(config, folder, options)
    if output["save"] and adapter is None:
        is_folder = shard_size is not None or _reads_a_folder(recipe, options.model_dirs)
        default = folder / ("model" if is_folder else "model.safetensors")
        path = Path(output["path"]).absolute() if output["path"] else default
    with prefixed("output."):
        check_quantize(output.get("quantize"), path, shard_size)
    return Point(config, folder, recipe, options, path, dtype, shard_size, adapter=adapter)


def _require_on_disk(path: str | None) -> None:
    """Raise ConfigError for an output elsewhere: a run hashes and measures the file that it has made."""
    if path and is_address(str(path)):
        raise ConfigError(
            f"output.path: {path} lies elsewhere, and outputs are written to this machine's disks by runs, "
            "which measure them. The verb merge writes to buckets: python -m mecha_exp merge RECIPE.mecha -o s3://bucket/path"
        )


def _reads_a_folder(recipe: Node, folders: Sequence[Path]) -> bool:
    """Whether the first model of a recipe is a folder, whose configuration and tokenizer a result needs."""
    sources = [str(model.source) for model in models_of(recipe) if not isinstance(model.source, InMemory)]
    try:
        first = find_model(sources[0], folders) if sources else None
    except CheckpointError:  # which `Point.files` reports
        return False
    return first is not None and (first.is_dir() or first.name.endswith(INDEX))

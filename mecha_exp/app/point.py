"""One grid point: from a resolved configuration to a recipe, its inputs, and what is wanted of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mecha_exp.app.provenance import input_names
from mecha_exp.app.templates import build_filled
from mecha_exp.checkpoint import dtype_name, parse_size
from mecha_exp.engine import EngineOptions, Job
from mecha_exp.engine.planner.by_key import output_dtype_words, parse_output_dtype
from mecha_exp.engine.provenance import metadata_of
from mecha_exp.errors import CheckpointError, ConfigError, Problems, did_you_mean
from mecha_exp.evaluation import Scoring, read_scoring, wants_weight_stats
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import InMemory, ModelNode, Node, models_of
from mecha_exp.lab.signature import Signature, signature_of
from mecha_exp.sources.search import find_model, folders_of

SECTIONS = (
    "models",
    "recipe",
    "blocks",
    "engine",
    "output",
    "evaluator",
    "tracking",
    "sweep",
    "experiment",
    "debug",
)
"""The groups of the configuration; of the other top-level keys all but `_NAMES` are hyperparameters."""
_NAMES = ("name", "plugins", "rerun", "store")
_NOT_IN_THE_TENSORS = ("save", "path", "durable", "shard_size")
"""What the configuration says of the output that does not change its tensors."""


@dataclass(frozen=True)
class Point:
    """A configuration turned into what the engine needs.

    Attributes:
        config: the resolved configuration.
        recipe: its graph.
        options: of the engine.
        output: the model's file or folder, or None where none is kept.
        dtype: of the output; None keeps each key's.
        shard_size: bytes of a file of the output; None for one file.
    """

    config: dict[str, Any]
    recipe: Node
    options: EngineOptions
    output: Path | None
    dtype: torch.dtype | ByKey | None
    shard_size: int | None = None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The top-level values that are no group's, and the blocks where there are any."""
        own = {k: v for k, v in self.config.items() if k not in (*SECTIONS, *_NAMES) and v is not None}
        return {**own, **({"blocks": self.config["blocks"]} if self.config["blocks"] else {})}

    @property
    def names_its_output(self) -> bool:
        """Whether the model is wanted at a place of the user's choice."""
        return self.output is not None and bool(self.config["output"]["path"])

    @property
    def wants_statistics(self) -> bool:
        """Whether the result is compared with its inputs in the pass that merges."""
        return wants_weight_stats(self.config["evaluator"])

    @cached_property
    def files(self) -> dict[ModelNode, Path]:
        """The file (or folder) of each model.

        Raises:
            CheckpointError: those that do not exist.
        """
        found: dict[ModelNode, Path] = {}
        problems = Problems()
        for model in models_of(self.recipe):
            if isinstance(model.source, InMemory):
                continue
            try:
                found[model] = find_model(model.source, self.options.model_dirs)
            except CheckpointError as error:
                problems.add(error)
        problems.raise_as(CheckpointError)
        return found

    @cached_property
    def names(self) -> dict[ModelNode, str]:
        """A short name for each input; see `input_names`."""
        return input_names(self.files)

    @property
    def parameters(self) -> dict[str, Any]:
        """What is written down of a point: hyperparameters, method, inputs, dtypes."""
        method = getattr(getattr(self.recipe, "method", None), "identifier", "model")
        return {
            **self.hyperparameters,
            "method": method,
            **{f"input/{name}": str(self.files[model]) for model, name in self.names.items()},
            "compute_dtype": dtype_name(self.options.compute_dtype),
            "output_dtype": output_dtype_words(self.dtype),
        }

    def job(
        self, output: Path | dict[str, torch.Tensor] | None, metadata: Mapping[str, str] | None = None
    ) -> Job:
        """What the engine is asked for; `metadata` is for the header, beside the recipe."""
        return Job(
            self.recipe,
            output,
            self.dtype,
            {**metadata_of(self.recipe, self.options, self.dtype), **(metadata or {})},
            statistics=self.wants_statistics,
            durable=bool(self.config["output"]["durable"]),
            shard_size=self.shard_size,
        )

    def scoring(self, shapes: Mapping[str, tuple[int, ...]]) -> Scoring:
        """What measures a model of these keys and shapes.

        Raises:
            ConfigError: everything that is wrong with the `evaluator` part of the configuration.
        """
        return read_scoring(self.config["evaluator"], shapes, self.config.get("plugins") or ())

    @property
    def output_settings(self) -> dict[str, Any]:
        """What the configuration says of the output's tensors."""
        return {k: v for k, v in self.config["output"].items() if k not in _NOT_IN_THE_TENSORS}

    def signature(self, contents: Mapping[Path, str]) -> Signature:
        """Its signature, with the content of each of its `files`."""
        by_model = {model: contents[path] for model, path in self.files.items()}
        given = self.output_settings
        given |= {"dtype": output_dtype_words(self.dtype), "shard_size": self.shard_size}
        output = {name: str(value) for name, value in given.items() if value is not None}
        return signature_of(self.recipe, by_model, self.options, output)


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The configuration without Hydra's part and with every reference filled in.

    Raises:
        ConfigError: a reference to nothing, or a value that must be given.
    """
    try:
        return {str(key): _resolved(cfg, str(key)) for key in cfg if key != "hydra"}
    except OmegaConfBaseException as error:
        place = f"{error.full_key}: " if error.full_key else ""
        message = str(error).splitlines()[0]
        if "${models.experts" in message or "models.experts" in str(error):
            message += ". The recipe needs more experts than models.experts lists"
        raise ConfigError(f"{place}{message}.") from None


def _resolved(cfg: DictConfig, key: str) -> Any:
    value = cfg[key]
    if not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def prepare(config: dict[str, Any], folder: Path) -> Point:
    """Check a configuration and build its recipe; reads no model.

    Args:
        config: as `resolve` gives it.
        folder: of the run, where the model goes unless output.path says otherwise.

    Raises:
        ConfigError: an engine or output setting that makes no sense.
        RecipeError: everything that is wrong with the recipe.
    """
    options = _options(config["engine"], folders_of(config))
    recipe = build_filled(config, options.model_dirs, (*SECTIONS, *_NAMES))
    output = config["output"]
    dtype = _output_dtype(output["dtype"])
    path, shard_size = None, _shard_size(output)
    if output["save"]:
        own = folder / ("model.safetensors" if shard_size is None else "model")
        path = Path(output["path"]).absolute() if output["path"] else own
    return Point(config, recipe, options, path, dtype, shard_size)


def _output_dtype(value: Any) -> torch.dtype | ByKey | None:
    try:
        return parse_output_dtype(value)
    except ConfigError as error:
        raise ConfigError(f"output.dtype: {error}") from None


def _shard_size(output: Mapping[str, Any]) -> int | None:
    if output.get("shard_size") is None:
        return None
    try:
        return parse_size(output["shard_size"])
    except ConfigError as error:
        raise ConfigError(f"output.shard_size: {error}") from None


def _options(engine: Mapping[str, Any], folders: list[Path]) -> EngineOptions:
    known = [name for name in EngineOptions.__dataclass_fields__ if name != "model_dirs"]
    for name in engine:
        if name not in known:
            raise ConfigError(f"engine.{name}: there is no such setting.{did_you_mean(name, known)}")
    try:
        return EngineOptions(**engine, model_dirs=folders)
    except ConfigError as error:
        raise ConfigError(f"engine.{error}") from None

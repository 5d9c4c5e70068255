"""One grid point: from a resolved configuration to a merged, measured and recorded model."""

from __future__ import annotations

import csv
import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mecha_exp.app import provenance
from mecha_exp.app.memory import PeakMemory
from mecha_exp.app.record import FINISHED, Record
from mecha_exp.architectures import infer_blocks
from mecha_exp.checkpoint import dtype_name, parse_dtype, parse_size
from mecha_exp.engine import EngineOptions, Job, MergeReport, Plan, plan, run_plan
from mecha_exp.engine.inputs import PACKAGE_SCHEME, find_model, packaged
from mecha_exp.engine.merging import recipe_metadata
from mecha_exp.engine.statistics import summarise
from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.evaluation import Scoring, nan_warning, read_scoring, wants_weight_stats
from mecha_exp.nodes import InMemory, ModelNode, Node, models_of
from mecha_exp.recipe import build_recipe, deserialize, serialize

log = logging.getLogger(__name__)

SECTIONS = ("models", "recipe", "blocks", "engine", "output", "evaluator", "tracking", "experiment", "debug")
"""The groups of the configuration; of the other top-level keys all but `_NAMES` are hyperparameters."""
_NAMES = ("name", "plugins")

ProgressBar = Callable[[Plan], Any]


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
    dtype: torch.dtype | None
    shard_size: int | None = None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The top-level values that are no group's, and the blocks where there are any."""
        own = {k: v for k, v in self.config.items() if k not in (*SECTIONS, *_NAMES) and v is not None}
        return {**own, **({"blocks": self.config["blocks"]} if self.config["blocks"] else {})}

    def scoring(self, planned: Plan) -> Scoring:
        """What measures the result.

        Raises:
            ConfigError: everything that is wrong with the `evaluator` part of the configuration.
        """
        shapes = {key: shape for key, (_, shape) in planned.layouts[0].items()}
        return read_scoring(self.config["evaluator"], shapes, self.config.get("plugins") or ())

    @contextmanager
    def plan(self) -> Iterator[tuple[Plan, dict[str, torch.Tensor]]]:
        """The checked plan, and the dictionary that it fills where no file is kept."""
        merged: dict[str, torch.Tensor] = {}
        job = Job(
            self.recipe,
            merged if self.output is None else self.output,
            self.dtype,
            recipe_metadata(self.recipe),
            statistics=wants_weight_stats(self.config["evaluator"]),
            durable=bool(self.config["output"]["durable"]),
            shard_size=self.shard_size,
        )
        with plan([job], self.options) as planned:
            yield planned, merged


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The configuration without Hydra's part and with every reference filled in.

    Raises:
        ConfigError: a reference to nothing, or a value that must be given.
    """
    bare = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    try:
        resolved = OmegaConf.to_container(bare, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        place = f"{error.full_key}: " if error.full_key else ""
        message = str(error).splitlines()[0]
        if "${models.experts" in message or "models.experts" in str(error):
            message += ". The recipe needs more experts than models.experts lists"
        raise ConfigError(f"{place}{message}.") from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def prepare(config: dict[str, Any], folder: Path) -> Point:
    """Check a configuration and build its recipe; reads no model.

    Args:
        config: as `resolve` gives it.
        folder: of the run, where the model goes unless output.path says otherwise.

    Raises:
        ConfigError: an engine or output setting that makes no sense.
        RecipeError: everything that is wrong with the recipe.
    """
    folders = [_folder(config["models"].get("dir"))]
    options = _options(config["engine"], [f for f in folders if f is not None])
    recipe = build_recipe(config.get("recipe"), load_text=lambda path: _load_text(path, options))
    output = config["output"]
    dtype = None if output["dtype"] in (None, "input") else parse_dtype(output["dtype"])
    path, shard_size = None, _shard_size(output)
    if output["save"]:
        own = folder / ("model.safetensors" if shard_size is None else "model")
        path = Path(output["path"]).absolute() if output["path"] else own
    return Point(config, recipe, options, path, dtype, shard_size)


def run(point: Point, record: Record, folder: Path, progress: ProgressBar) -> Record:
    """Merge, measure, and write everything but the tracking into the run's folder."""
    with PeakMemory() as memory, point.plan() as (planned, merged):
        scoring = point.scoring(planned)
        names = provenance.input_names(planned)
        with progress(planned) as advance:
            report = run_plan(planned, advance)
        if report.resumed_keys:
            log.info("resumed: %d of %d keys were already done", report.resumed_keys, report.keys)
        for warning in report.warnings:
            log.warning(warning)
        tables = _weight_statistics(report, names)
        record.parameters = _parameters(point, planned, names)
        record.tags = provenance.tags(point.recipe, planned, point.dtype)
        record.metrics = {**_merge_metrics(report), **tables.metrics}
    record.metrics["memory/peak_bytes"] = float(memory.peak)
    if scoring.evaluations:
        files = {names[m]: s.path for m, s in planned.sources.items() if m.merge_space == "weight" and s.path}
        _evaluate(scoring, point, merged, files, record)
    record.status = FINISHED
    _write_files(point, tables.text, folder)
    return record


def _evaluate(
    scoring: Scoring,
    point: Point,
    merged: Mapping[str, torch.Tensor],
    references: Mapping[str, Path],
    record: Record,
) -> None:
    """Measure the result, and the inputs to compare it with."""
    started = time.perf_counter()
    record.metrics.update(scoring.measure(merged if point.output is None else point.output))
    record.metrics["time/evaluate_seconds"] = time.perf_counter() - started
    record.metric, record.direction, record.units = scoring.metric, scoring.direction, scoring.units
    if warning := nan_warning(scoring, record.metrics):
        log.warning("%s: %s", record.name, warning)
    for name, path in references.items():
        record.references[name] = provenance.measure_input(scoring, path)


@dataclass(frozen=True)
class _Tables:
    metrics: dict[str, float]
    text: str


def _weight_statistics(report: MergeReport, names: Mapping[ModelNode, str]) -> _Tables:
    """Metrics over the whole model, and a table by block."""
    metrics: dict[str, float] = {}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["input", "block", "distance", "relative_change", "cosine", "norm", "input_norm"])
    for model, by_key in report.moments[0].items():
        name = names[model]
        whole = summarise(by_key)[""]
        metrics[f"weights/distance/{name}"] = whole.distance
        metrics[f"weights/relative_change/{name}"] = whole.relative_change
        metrics[f"weights/cosine/{name}"] = whole.cosine
        by_block = summarise(by_key, infer_blocks(by_key).__getitem__)
        for block, s in {"(all)": whole, **by_block}.items():
            rows.writerow([name, block, s.distance, s.relative_change, s.cosine, s.norm, s.input_norm])
    return _Tables(metrics, text.getvalue())


def _merge_metrics(report: MergeReport) -> dict[str, float]:
    return {
        "time/merge_seconds": report.seconds,
        "io/bytes_read": float(report.bytes_read),
        "io/bytes_written": float(report.bytes_written),
        "io/bytes_per_second": report.bytes_per_second,
        "io/keys": float(report.keys),
        "io/resumed_keys": float(report.resumed_keys),
        "nonfinite_values": float(sum(report.nonfinite_values)),
    }


def _parameters(point: Point, planned: Plan, names: Mapping[ModelNode, str]) -> dict[str, Any]:
    method = getattr(getattr(point.recipe, "method", None), "identifier", "model")
    return {
        **point.hyperparameters,
        "method": method,
        **{f"input/{name}": planned.sources[model].name for model, name in names.items()},
        "compute_dtype": dtype_name(point.options.compute_dtype),
        "output_dtype": dtype_name(point.dtype) if point.dtype else "input",
    }


def _write_files(point: Point, statistics: str, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(point.config, sort_keys=False), encoding="utf-8")
    if not any(isinstance(m.source, InMemory) for m in models_of(point.recipe)):
        (folder / "recipe.mecha").write_text(serialize(point.recipe), encoding="utf-8")
    if wants_weight_stats(point.config["evaluator"]):
        (folder / "weight_stats.csv").write_text(statistics, encoding="utf-8")


def _shard_size(output: Mapping[str, Any]) -> int | None:
    if output.get("shard_size") is None:
        return None
    try:
        return parse_size(output["shard_size"])
    except ConfigError as error:
        raise ConfigError(f"output.shard_size: {error}") from None


def _folder(text: str | None) -> Path | None:
    if not text:
        return None
    return packaged(text) if text.startswith(PACKAGE_SCHEME) else Path(text)


def _options(engine: Mapping[str, Any], folders: list[Path]) -> EngineOptions:
    known = [name for name in EngineOptions.__dataclass_fields__ if name != "model_dirs"]
    for name in engine:
        if name not in known:
            raise ConfigError(f"engine.{name}: there is no such setting.{did_you_mean(name, known)}")
    try:
        return EngineOptions(**engine, model_dirs=folders)
    except ConfigError as error:
        raise ConfigError(f"engine.{error}") from None


def _load_text(path: str, options: EngineOptions) -> Node:
    found = find_model(path, options.model_dirs)
    return deserialize(found.read_text(encoding="utf-8"))

"""The files of a run's folder, from which runs are compared, tracked and looked up later.

model.safetensors   the merged model, or the folder model (unless output=none)
outcomes.parquet    what evaluators saw on each example
files/              what evaluators gave beside their numbers, such as pictures
run.json            everything below in one file; tracking and sweep tables read it
metrics.json        the numbers
recipe.yaml         the resolved configuration
recipe.mecha        the recipe as text
block_values.csv    the value of each block, of hyperparameters that differ by block
block_values.png    the same as a figure, of a run that is not part of a sweep
weight_stats.csv    distance and cosine to each input, by block
changes.diff        uncommitted changes, if the run started in a repository
changes_of_mecha_exp.diff    of the checkout of mecha_exp, where that is another repository
mecha_exp.log, .hydra/
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mecha_exp.documents import DocumentError, read_json, read_yaml, typed
from mecha_exp.errors import ConfigError, counted
from mecha_exp.system.atomic_write import atomic_write_text

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
METRICS_FILE = "metrics.json"
CONFIG_FILE, RECIPE_FILE = "recipe.yaml", "recipe.mecha"
STATISTICS_FILE = "weight_stats.csv"
CHANGES_FILE, CHECKOUT_CHANGES_FILE = "changes.diff", "changes_of_mecha_exp.diff"
BLOCKS_FILE = "block_values.csv"
BLOCKS_FIGURE = "block_values.png"
FINISHED, FAILED = "FINISHED", "FAILED"
ENVIRONMENT = ("git/", "version/", "machine/")
"""The beginnings of the names of tags that say what a run was made with."""
INPUT_PREFIX = "input/"
"""The beginning of the names of parameters that are the paths of inputs."""
RACE = "race/"
"""The beginning of the names of what a race measured of a point on some of the examples."""
RACE_EXAMPLES, RACE_FIDELITY = f"{RACE}examples", f"{RACE}fidelity"
"""The metrics that tell on how many examples, or at which value of a fidelity, a point was measured."""


@dataclass
class Record:
    """The record of one grid point: recipe, settings, metrics and status.

    Attributes:
        name: the settings that differ from other points, as in `alpha=0.3`.
        status: `FINISHED` or `FAILED`.
        error: why it failed.
        started, ended: milliseconds since 1970.
        overrides: of the command line, for this point.
        parameters: hyperparameters, method, inputs, dtypes.
        metrics: measured numbers by name; see the documentation for the names.
        tags: commit, versions, signature.
        metric, direction: the evaluator's main metric, and whether more of it is better.
        directions: the same of each evaluator's main metric, the first included, or of the objectives.
        objectives: the metrics that are traded off, where there are several, each with its direction.
        references: the metrics of each input.
        base: the name of the input that is the base.
        expert_of: the name of the input that is the expert of a task, where the configuration names it.
        units: of the metrics, as their evaluators declare them.
        block_weights: the mean of each hyperparameter in each block, where it differs by key.
        tracking_error: why the run is not in MLflow although it should be.
        signature: the hash of everything that decides the result's bytes.
        evaluations: the key of each evaluation, by the prefix of its metrics: what decides its numbers.
        split: the part of the data by which points are chosen; None if the main evaluator has no splits.
        report_split: the part on which chosen points are reported, if there is one.
        reported: the keys of the evaluations on that part, where the point was chosen.
        race: the settings of the race that the point took part in; empty without one.
        dropped: after how many examples, or at which value of a fidelity, a race dropped the point; None if
            it was measured whole.
        found: whether the result was already stored, so that nothing was computed.
        model: the path of the merged model, if it was kept; it may lie in the folder of an earlier run.
        model_sha256: of its bytes.
        note: a remark for the table, such as that the point was merged again.
        run_id: of the MLflow run.
        origin: what decided the bytes beside the recipe; see `Origin`.
    """

    name: str
    status: str = FINISHED
    error: str | None = None
    started: int = 0
    ended: int = 0
    overrides: list[str] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metric: str | None = None
    direction: str = "maximize"
    directions: dict[str, str] = field(default_factory=dict)
    objectives: dict[str, str] = field(default_factory=dict)
    references: dict[str, dict[str, float]] = field(default_factory=dict)
    base: str | None = None
    expert_of: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    block_weights: dict[str, dict[str, float]] = field(default_factory=dict)
    tracking_error: str | None = None
    signature: str = ""
    evaluations: dict[str, str] = field(default_factory=dict)
    split: str | None = None
    report_split: str | None = None
    reported: dict[str, str] = field(default_factory=dict)
    race: dict[str, Any] = field(default_factory=dict)
    dropped: int | None = None
    found: bool = False
    model: str | None = None
    model_sha256: str | None = None
    note: str | None = None
    run_id: str | None = None
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether the run succeeded."""
        return self.status == FINISHED

    @property
    def inputs(self) -> dict[str, str]:
        """The paths of the inputs by their names."""
        named = self.parameters.items()
        return {key.removeprefix(INPUT_PREFIX): path for key, path in named if key.startswith(INPUT_PREFIX)}

    @property
    def environment(self) -> dict[str, str]:
        """The tags that say what the run was made with."""
        return {name: value for name, value in self.tags.items() if name.startswith(ENVIRONMENT)}

    @property
    def dropped_where(self) -> str:
        """After how many examples, or at which fidelity, the point was dropped, in words."""
        key = self.race.get("key")
        return f"at {key}={self.dropped}" if key else f"after {counted(self.dropped or 0, 'example')}"

    @property
    def has_model(self) -> bool:
        """Whether the merged model exists with the bytes that were written."""
        from mecha_exp.lab.content_hash import (
            content_is,
        )  # imports torch, which reading records does not need

        return self.model is not None and content_is(Path(self.model), self.model_sha256)

    def save(self, folder: Path) -> None:
        """Write `run.json` and `metrics.json`."""
        self.save_run(folder)
        write_json(folder / METRICS_FILE, self.metrics)

    def save_run(self, folder: Path) -> None:
        """Write `run.json` alone, where the metrics are as they were."""
        write_json(folder / RUN_FILE, vars(self))

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Read `run.json`.

        Raises:
            ConfigError: the file does not exist or is damaged.
        """
        try:
            return typed(read_json(folder / RUN_FILE), cls)
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no finished run: there is no {RUN_FILE} in it.") from None
        except (OSError, DocumentError) as error:
            raise ConfigError(f"{folder / RUN_FILE} is damaged: {error}.") from None

    @classmethod
    def find(cls, folder: Path) -> Record | None:
        """Read `run.json`; None where there is none that can be read."""
        try:
            return cls.load(folder)
        except ConfigError:
            return None


@dataclass(frozen=True)
class _Models:
    dir: str | None = None


@dataclass(frozen=True)
class _Settings:
    """The sections of a resolved configuration that commands look into."""

    plugins: list[str] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    evaluator: dict[str, Any] = field(default_factory=dict)
    models: _Models = field(default_factory=_Models)
    data: dict[str, Any] = field(default_factory=dict)
    hub: dict[str, Any] = field(default_factory=dict)
    tracking: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, Any] = field(default_factory=dict)


def read_recipe(folder: Path) -> str:
    """The text of the recipe in a run's folder; empty where it has none, as a merge of models in memory."""
    try:
        return (folder / RECIPE_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_settings(folder: Path) -> dict[str, Any]:
    """The resolved configuration in a run's folder, `recipe.yaml`.

    Raises:
        ConfigError: it is not there, or is damaged.
    """
    path = folder / CONFIG_FILE
    try:
        content = read_yaml(path)
        sections = typed(content, _Settings, foreign=True)
    except OSError as error:
        raise ConfigError(f"{folder} does not say how it was made: {error}.") from None
    except DocumentError as error:
        raise ConfigError(f"{path} is damaged: {error}.") from None
    return {**asdict(sections), **content}


def load_all(folder: Path) -> dict[Path, Record]:
    """The records of a sweep's points, by folder, in the order of their numbers."""
    folders = [path.parent for path in folder.rglob(RUN_FILE)]
    folders.sort(key=lambda path: (not path.name.isdecimal(), path.name.zfill(9)))
    records = {}
    for path in folders:
        try:
            records[path] = Record.load(path)
        except ConfigError as error:
            log.warning("%s The point counts as not made.", error)
    return records


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; NaN and infinities, which JSON lacks, become text."""
    data = json_ready(value, repr)
    atomic_write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def json_ready(value: Any, nonfinite: Callable[[float], Any]) -> Any:
    """Convert nested data to JSON's types: NaN and infinities by `nonfinite`, unknown types to text."""
    if isinstance(value, dict):
        return {str(key): json_ready(item, nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item, nonfinite) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return nonfinite(value)
    return value if isinstance(value, float | int | bool | str | None) else str(value)

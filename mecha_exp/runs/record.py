"""What a run leaves in its folder, so that it can be compared, tracked and looked up later.

model.safetensors   the merged model (unless output=none)
run.json            everything below in one file, which tracking and sweep tables are made from
metrics.json        the numbers
recipe.yaml         the resolved configuration
recipe.mecha        the recipe as text
block_values.csv    what each block got of hyperparameters that are not one number
block_values.png    the same as a figure, of a run that is not part of a sweep
weight_stats.csv    distance and cosine to each input, by block
changes.diff        what was not committed, if this runs from a repository
mecha_exp.log, .hydra/
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mecha_exp.errors import ConfigError
from mecha_exp.system.atomic_write import atomic_write_text

RUN_FILE = "run.json"
METRICS_FILE = "metrics.json"
CHANGES_FILE = "changes.diff"
BLOCKS_FILE = "block_values.csv"
BLOCKS_FIGURE = "block_values.png"
FINISHED, FAILED = "FINISHED", "FAILED"


@dataclass
class Record:
    """One grid point: what was merged, how, and what came of it.

    Attributes:
        name: what differs from its neighbours, as in `alpha=0.3`.
        status: `FINISHED` or `FAILED`.
        error: why it failed.
        started, ended: milliseconds since 1970.
        overrides: the command line's, for this point.
        parameters: hyperparameters, method, inputs, dtypes.
        metrics: what was measured; see the documentation for their names.
        tags: commit, versions, signature.
        metric, direction: the evaluator's main metric and whether more of it is better.
        references: the same metrics for each input.
        units: of the metrics, as their evaluators say.
        block_weights: of each hyperparameter that differs by key its mean in each block.
        tracking_error: why it is not in MLflow, if it should be.
        signature: the hash of all that decides the result's bytes.
        evaluations: what measured it: names, versions and parameters.
        found: whether the merge was known before, so that nothing was computed.
        model: where the merged model lies, if it was kept; in another run's folder where it was found.
        model_sha256: of its bytes.
        note: what the reader of a table should know, such as a point that was made again.
        run_id: of its MLflow run.
        origin: what decided its bytes beside the recipe; see `Origin`.
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
    references: dict[str, dict[str, float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    block_weights: dict[str, dict[str, float]] = field(default_factory=dict)
    tracking_error: str | None = None
    signature: str = ""
    evaluations: list[str] = field(default_factory=list)
    found: bool = False
    model: str | None = None
    model_sha256: str | None = None
    note: str | None = None
    run_id: str | None = None
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether nothing went wrong."""
        return self.status == FINISHED

    @property
    def has_model(self) -> bool:
        """Whether the merged model is there, with the bytes that were written."""
        from mecha_exp.lab.content_hash import (
            content_is,  # it brings torch, and records are also read without
        )

        return self.model is not None and content_is(Path(self.model), self.model_sha256)

    def save(self, folder: Path) -> None:
        """Write `run.json` and `metrics.json`."""
        write_json(folder / RUN_FILE, asdict(self))
        write_json(folder / METRICS_FILE, self.metrics)

    @classmethod
    def load(cls, folder: Path) -> Record:
        """What `save` wrote.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        try:
            record = cls(**json.loads((folder / RUN_FILE).read_text(encoding="utf-8")))
            record.metrics = {name: float(value) for name, value in record.metrics.items()}
            return record
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no finished run: there is no {RUN_FILE} in it.") from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{folder / RUN_FILE} is damaged: {error}.") from None


def load_all(folder: Path) -> dict[Path, Record]:
    """The records of a sweep's points, by folder, in the order of their numbers."""
    found = [path.parent for path in folder.rglob(RUN_FILE)]
    found.sort(key=lambda path: (not path.name.isdecimal(), path.name.zfill(9)))
    return {path: Record.load(path) for path in found}


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; NaN and infinities, which JSON lacks, become text."""
    data = json_ready(value, repr)
    atomic_write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def json_ready(value: Any, nonfinite: Callable[[float], Any]) -> Any:
    """Nested data as JSON has it: other types as text, and NaN and infinities as `nonfinite` returns them."""
    if isinstance(value, dict):
        return {str(key): json_ready(item, nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item, nonfinite) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return nonfinite(value)
    return value if isinstance(value, float | int | bool | str | None) else str(value)

"""What a store of results keeps: merges, and what evaluators measured."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mecha_exp.lab.content_hash import content_is
from mecha_exp.system.texts import csv_text

WEIGHTS = "weights/"
"""The prefix of the names of weight statistics."""


@dataclass(frozen=True)
class ModelFile:
    """A merged model on disk.

    Attributes:
        path: the absolute path.
        sha256: the hash of its bytes.
        size: its size in bytes.
    """

    path: str
    sha256: str
    size: int

    def is_intact(self) -> bool:
        """Whether the file exists and is unchanged."""
        return content_is(Path(self.path), self.sha256)


@dataclass(frozen=True)
class StoredEvaluation:
    """What an evaluator measured.

    Attributes:
        metrics: its numbers by name.
        outcomes: its outcomes by example, as the content of a Parquet file; None if it has none.
        files: its files by plain names: contents, or paths in the store.
    """

    metrics: Mapping[str, float]
    outcomes: bytes | None = None
    files: Mapping[str, bytes | Path] = field(default_factory=dict)

    @property
    def checksum(self) -> str:
        """A hash of numbers and outcomes by which a damaged file is recognised."""
        texts = sorted((name, repr(float(value))) for name, value in self.metrics.items())
        return hashlib.sha256(json.dumps(texts).encode() + b"\0" + (self.outcomes or b"")).hexdigest()

    def contents(self) -> dict[str, bytes]:
        """The contents of its files by name."""
        return {n: c.read_bytes() if isinstance(c, Path) else c for n, c in self.files.items()}


@dataclass(frozen=True)
class StoredMerge:
    """The result of a merge on disk, without the model itself.

    Attributes:
        signature: the hash of the point's signature.
        parts: the content of that hash (`Signature.parts`).
        names: the inputs' names, in the order of `parts["inputs"]`.
        metrics: weight statistics, times, bytes.
        statistics: the weight statistics by block, as CSV; empty if the model was not compared.
        warnings: the warnings of the merge.
        tags: the commit, the versions of packages.
        model: the saved model, if one was saved.
        folder: the folder of the run that made it.
        made: the time of the merge, in milliseconds since 1970.
    """

    signature: str
    parts: dict[str, Any]
    names: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    statistics: str = ""
    warnings: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    model: ModelFile | None = None
    folder: str = ""
    made: int = 0

    def renamed(self, names: Sequence[str]) -> StoredMerge:
        """A copy with new names for the inputs, whose files may have been renamed since."""
        new = dict(zip(self.names, names, strict=True)) if len(self.names) == len(names) else {}
        if all(old == name for old, name in new.items()):
            return self
        rows = csv.reader(io.StringIO(self.statistics))
        statistics = csv_text([new.get(row[0], row[0]), *row[1:]] for row in rows)
        metrics = {_renamed(metric, new): value for metric, value in self.metrics.items()}
        return replace(self, names=list(names), metrics=metrics, statistics=statistics)


def _renamed(metric: str, names: Mapping[str, str]) -> str:
    """Replace the input's name in `weights/distance/NAME`."""
    if not metric.startswith(WEIGHTS):
        return metric
    what, _, name = metric.removeprefix(WEIGHTS).partition("/")
    return f"{WEIGHTS}{what}/{names.get(name, name)}"

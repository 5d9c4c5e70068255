"""Results by signature, so that nothing is computed twice.

outputs/store/
    store.json                   the format's version
    points/SIGNATURE/
        merge.json               what the merge gave: see `StoredMerge`
        failure.json             why the last try failed, where it did
        evaluation-HASH.json     what an evaluator measured, by its name, version and parameters
    inputs/SHA256/
        evaluation-HASH.json     the same of an input, by its content
    sweeps/KEY.json              the folder in which a sweep with that command lies

Every file appears whole or not at all, and two processes that write the same one write the same thing; so the
store survives kills and serves several sweeps at once.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mecha_exp.errors import StoreError
from mecha_exp.lab.content_hash import content_is
from mecha_exp.system.atomic_write import atomic_write_text

VERSION = 1
WEIGHTS = "weights/"
"""What the names of weight statistics begin with."""
_VERSION_FILE, _MERGE, _FAILURE = "store.json", "merge.json", "failure.json"


@dataclass(frozen=True)
class ModelFile:
    """A merged model on disk.

    Attributes:
        path: absolute.
        sha256: of its bytes.
        size: in bytes.
    """

    path: str
    sha256: str
    size: int

    def is_intact(self) -> bool:
        """Whether the file is there with the bytes that were written."""
        return content_is(Path(self.path), self.sha256)


@dataclass(frozen=True)
class StoredMerge:
    """What a merge gave, without the model itself.

    Attributes:
        signature: of the point.
        parts: what the signature is the hash of (`Signature.parts`).
        names: the inputs' names, in the order of `parts["inputs"]`.
        metrics: weight statistics, times, bytes.
        statistics: the table of weight statistics by block, as CSV; empty where they were not wanted.
        warnings: what was odd.
        tags: the commit, the versions of packages.
        model: the file, where one was written.
        folder: of the run that made it.
        made: milliseconds since 1970.
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
        """The same with other names for the inputs, which are files that may be called something else now."""
        new = dict(zip(self.names, names, strict=True)) if len(self.names) == len(names) else {}
        if all(old == name for old, name in new.items()):
            return self
        rows = list(csv.reader(io.StringIO(self.statistics)))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([new.get(row[0], row[0]), *row[1:]] for row in rows)
        metrics = {_renamed(metric, new): value for metric, value in self.metrics.items()}
        return replace(self, names=list(names), metrics=metrics, statistics=text.getvalue())


def _renamed(metric: str, names: Mapping[str, str]) -> str:
    """`weights/distance/NAME` with the name that the input has now."""
    if not metric.startswith(WEIGHTS):
        return metric
    what, _, name = metric.removeprefix(WEIGHTS).partition("/")
    return f"{WEIGHTS}{what}/{names.get(name, name)}"


class ResultStore:
    """The results below a folder.

    Raises:
        StoreError: another version has written it, or it cannot be written; from any method.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        found = _read(self.folder / _VERSION_FILE)
        version = found.get("version", VERSION) if isinstance(found, dict) else VERSION
        if version != VERSION:
            raise StoreError(
                f"the store {folder} was written by a newer mecha_exp (format {version}; this one reads "
                f"{VERSION}). Use that version, or another folder with store=..."
            )

    def __iter__(self) -> Iterator[StoredMerge]:
        """Every merge that is kept."""
        for path in sorted((self.folder / "points").glob(f"*/{_MERGE}")):
            kept = self.find(path.parent.name)
            if kept is not None:
                yield kept

    def find(self, signature: str) -> StoredMerge | None:
        """What the merge of a signature gave, if it is known. The model's file is not looked at."""
        found = _read(self._point(signature) / _MERGE)
        try:
            model = found.pop("model", None)
            return StoredMerge(**found, model=ModelFile(**model) if model else None)
        except (AttributeError, TypeError):  # not there, or not what we write
            return None

    def keep(self, kept: StoredMerge) -> None:
        """Remember a merge."""
        self._write(self._point(kept.signature) / _MERGE, asdict(kept))
        self.forgive(kept.signature)

    def failure(self, signature: str) -> str | None:
        """Why the last try at a point failed, where it did."""
        found = _read(self._point(signature) / _FAILURE)
        return str(found["error"]) if isinstance(found, dict) and "error" in found else None

    def fail(self, signature: str, error: str) -> None:
        """Remember that a point failed."""
        self._write(self._point(signature) / _FAILURE, {"error": error})

    def forgive(self, signature: str) -> None:
        """Forget a failure."""
        with contextlib.suppress(OSError):
            (self._point(signature) / _FAILURE).unlink(missing_ok=True)

    def evaluation(self, key: str, signature: str = "", *, content: str = "") -> dict[str, float] | None:
        """What an evaluator measured of a point, or of an input with that content (its SHA-256)."""
        found = _read(self._evaluation(key, signature, content))
        try:
            return {name: float(value) for name, value in found["metrics"].items()}
        except (TypeError, KeyError, ValueError, AttributeError):
            return None

    def keep_evaluation(
        self, key: str, metrics: dict[str, float], signature: str = "", *, content: str = ""
    ) -> None:
        """Remember what an evaluator measured of a point, or of an input."""
        self._write(self._evaluation(key, signature, content), {"evaluator": key, "metrics": metrics})

    def sweep_folder(self, key: str) -> Path | None:
        """Where the sweep of a command lies, if it has been started before and is still there."""
        found = _read(self.folder / "sweeps" / f"{key}.json")
        folder = Path(found["folder"]) if isinstance(found, dict) and "folder" in found else None
        if folder is None or not folder.is_dir():
            return None
        return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder

    def keep_sweep(self, key: str, folder: Path) -> None:
        """Remember where the sweep of a command lies."""
        self._write(self.folder / "sweeps" / f"{key}.json", {"folder": str(folder.absolute())})

    def places(self) -> list[Path]:
        """The folder of every point, named by its signature."""
        return sorted(place for place in (self.folder / "points").glob("*") if place.is_dir())

    def lost_sweeps(self) -> list[Path]:
        """What is kept of sweeps whose folders are gone."""
        kept = sorted((self.folder / "sweeps").glob("*.json"))
        return [path for path in kept if self.sweep_folder(path.stem) is None]

    def _point(self, signature: str) -> Path:
        return self.folder / "points" / signature

    def _evaluation(self, key: str, signature: str, content: str) -> Path:
        place = self.folder / "inputs" / content if content else self._point(signature)
        return place / f"evaluation-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        marker = self.folder / _VERSION_FILE
        try:
            if not marker.exists():
                atomic_write_text(marker, json.dumps({"version": VERSION}))
            atomic_write_text(path, json.dumps(value, indent=1, ensure_ascii=False))
        except OSError as error:
            cause = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            raise StoreError(
                f"the store {self.folder} cannot be written: {cause}. The result is in the run's folder, but "
                "it will be computed again. Make room, or choose another folder with store=..."
            ) from error


def _read(path: Path) -> Any:
    """The JSON in a file; None where there is none, or where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

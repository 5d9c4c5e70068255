"""A store of results by signature, so that nothing is computed twice.

outputs/store/
    store.json                   the format's version
    points/SIGNATURE/
        merge.json               the result of the merge: see `StoredMerge`
        failure.json             the errors of the last attempts that failed: of the merge, of each evaluation
        evaluation-KEY.json      the numbers of an evaluator, by what decides them
        evaluation-KEY.parquet   its outcomes by example, if it has them
        evaluation-KEY/          its files by name, if it has some
        .evaluation-KEY.partial  the parts of a measurement that goes on; `clean` deletes those left behind
    inputs/SHA256/
        evaluation-KEY.json, .parquet     the same of an input, by its content
    sweeps/KEY.json              the folder of the sweep with that command

Files are written atomically, and two processes that write one file write the same content; so the store
survives kills and serves several sweeps at once.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mecha_exp.errors import StoreError
from mecha_exp.lab.content_hash import content_is
from mecha_exp.system.atomic_write import atomic_write, atomic_write_text
from mecha_exp.system.write_errors import cause_of, existing_folder

VERSION = 1
WEIGHTS = "weights/"
"""The prefix of the names of weight statistics."""
STORE_FILE = "store.json"
"""The file that marks a folder as a store."""
_MERGE, _FAILURE = "merge.json", "failure.json"


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
        rows = list(csv.reader(io.StringIO(self.statistics)))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([new.get(row[0], row[0]), *row[1:]] for row in rows)
        metrics = {_renamed(metric, new): value for metric, value in self.metrics.items()}
        return replace(self, names=list(names), metrics=metrics, statistics=text.getvalue())


def _renamed(metric: str, names: Mapping[str, str]) -> str:
    """Replace the input's name in `weights/distance/NAME`."""
    if not metric.startswith(WEIGHTS):
        return metric
    what, _, name = metric.removeprefix(WEIGHTS).partition("/")
    return f"{WEIGHTS}{what}/{names.get(name, name)}"


class ResultStore:
    """The results in a folder.

    Raises:
        StoreError: a newer version wrote the store, or it cannot be written; from any method.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        header = _read(self.folder / STORE_FILE)
        version = header.get("version", VERSION) if isinstance(header, dict) else VERSION
        if version != VERSION:
            raise StoreError(
                f"the store {folder} was written by a newer mecha_exp (format {version}; this one reads "
                f"{VERSION}). Use that version, or another folder with store=..."
            )

    def __iter__(self) -> Iterator[StoredMerge]:
        """Iterate over all stored merges."""
        for path in sorted((self.folder / "points").glob(f"*/{_MERGE}")):
            stored = self.get(path.parent.name)
            if stored is not None:
                yield stored

    def get(self, signature: str) -> StoredMerge | None:
        """The merge with a signature, or None. Does not check the model's file."""
        fields = _read(self._point(signature) / _MERGE)
        try:
            model = fields.pop("model", None)
            return StoredMerge(**fields, model=ModelFile(**model) if model else None)
        except (AttributeError, TypeError):  # missing, or not in our format
            return None

    def put(self, merge: StoredMerge) -> None:
        """Store a merge, and forget that it failed earlier."""
        self._write(self._point(merge.signature) / _MERGE, asdict(merge))
        self.clear_failure(merge.signature)

    def failure(self, signature: str, evaluations: Iterable[str] = ()) -> str | None:
        """The error of the last attempt at a point, or None if it did not fail.

        Args:
            signature: of the point.
            evaluations: the keys of the evaluations that are asked for: the failure of another one does not
                count.
        """
        errors = self.failures(signature)
        return next((errors[key] for key in ("", *evaluations) if key in errors), None)

    def failures(self, signature: str) -> dict[str, str]:
        """The errors of a point: by the key of the evaluation that failed, "" for the merge itself."""
        errors = _read(self._point(signature) / _FAILURE)
        if not isinstance(errors, dict) or not all(isinstance(error, str) for error in errors.values()):
            return {}
        return errors

    def put_failure(self, signature: str, error: str, evaluation: str = "") -> None:
        """Store that a point failed: its merge, or the evaluation with this key."""
        self._write(self._point(signature) / _FAILURE, {**self.failures(signature), evaluation: error})

    def clear_failure(self, signature: str, evaluations: Iterable[str] = ()) -> None:
        """Forget that the merge of a point failed, and these evaluations; what else failed is kept."""
        errors = self.failures(signature)
        forgotten = {"", *evaluations}
        if remaining := {key: error for key, error in errors.items() if key not in forgotten}:
            if remaining != errors:
                self._write(self._point(signature) / _FAILURE, remaining)
            return
        with contextlib.suppress(OSError):
            (self._point(signature) / _FAILURE).unlink(missing_ok=True)

    def evaluation(self, key: str, signature: str = "", *, content: str = "") -> StoredEvaluation | None:
        """What an evaluator measured of a point, or of an input with that content (its SHA-256).

        None if it is not stored, or if a file was damaged since.
        """
        path = self._evaluation(key, signature, content)
        fields = _read(path)
        try:
            outcomes = _outcomes_file(path).read_bytes() if fields["outcomes"] else None
            metrics = {name: float(value) for name, value in fields["metrics"].items()}
            hashes = fields.get("files", {})
            files = {name: path.with_suffix("") / name for name in hashes}
            stored = StoredEvaluation(metrics, outcomes, files)
            intact = all(content_is(file, hashes[name]) for name, file in files.items())
            return stored if intact and stored.checksum == fields["checksum"] else None
        except (TypeError, KeyError, ValueError, AttributeError, OSError):
            return None

    def put_evaluation(
        self, key: str, measured: StoredEvaluation, signature: str = "", *, content: str = ""
    ) -> None:
        """Store what an evaluator measured of a point, or of an input."""
        path = self._evaluation(key, signature, content)
        fields = {
            "evaluator": key,
            "metrics": dict(measured.metrics),
            "outcomes": measured.outcomes is not None,
            "checksum": measured.checksum,
        }
        contents = {name: _bytes_of(content) for name, content in measured.files.items()}
        if contents:
            fields["files"] = {n: hashlib.sha256(content).hexdigest() for n, content in contents.items()}
        beside = {path.with_suffix("") / name: content for name, content in contents.items()}
        if measured.outcomes is not None:
            beside[_outcomes_file(path)] = measured.outcomes
        self._write(path, fields, beside)
        partial = self.partial(key, signature, content=content)
        for file in partial.parent.glob(f"{partial.name}*"):  # that of lm_eval is named after it
            with contextlib.suppress(OSError):
                file.unlink()

    def partial(self, key: str, signature: str = "", *, content: str = "") -> Path:
        """The file that keeps the parts of a measurement until it is stored as a whole."""
        whole = self._evaluation(key, signature, content)
        return whole.with_name(f".{whole.stem}.partial")

    def sweep_folder(self, key: str) -> Path | None:
        """The folder of the sweep with a command, if it was started before and still exists."""
        sweep = _read(self.folder / "sweeps" / f"{key}.json")
        folder = Path(sweep["folder"]) if isinstance(sweep, dict) and "folder" in sweep else None
        if folder is None or not folder.is_dir():
            return None
        return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder

    def put_sweep(self, key: str, folder: Path) -> None:
        """Store the folder of the sweep with a command."""
        self._write(self.folder / "sweeps" / f"{key}.json", {"folder": str(folder.absolute())})

    def points(self) -> list[Path]:
        """The folder of every point, named by its signature."""
        return sorted(path for path in (self.folder / "points").glob("*") if path.is_dir())

    def lost_sweeps(self) -> list[Path]:
        """The files of sweeps whose folders are gone."""
        files = sorted((self.folder / "sweeps").glob("*.json"))
        return [path for path in files if self.sweep_folder(path.stem) is None]

    def _point(self, signature: str) -> Path:
        return self.folder / "points" / signature

    def _evaluation(self, key: str, signature: str, content: str) -> Path:
        folder = self.folder / "inputs" / content if content else self._point(signature)
        return folder / f"evaluation-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    def _write(self, path: Path, value: dict[str, Any], beside: Mapping[Path, bytes] | None = None) -> None:
        """Write a JSON file, after the files that it speaks of."""
        marker = self.folder / STORE_FILE
        try:
            if not marker.exists():
                atomic_write_text(marker, json.dumps({"version": VERSION}))
            for file, content in (beside or {}).items():
                file.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(file) as temporary:
                    temporary.write_bytes(content)
            atomic_write_text(path, json.dumps(value, indent=1, ensure_ascii=False))
        except OSError as error:
            cause = cause_of(error, existing_folder(path.absolute())) or error.strerror or str(error)
            raise StoreError(
                f"the store {self.folder} cannot be written: {cause}. The result is in the run's folder, but "
                "it will be computed again. Another folder is chosen with store=..."
            ) from error


def _outcomes_file(path: Path) -> Path:
    """The file beside an evaluation that holds its outcomes."""
    return path.with_suffix(".parquet")


def _bytes_of(content: bytes | Path) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content


def _read(path: Path) -> Any:
    """The JSON in a file; None if the file is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None

"""A store of results by signature, so that nothing is computed twice.

outputs/store/
    store.json                   the format's version
    points/SIGNATURE/
        merge.json               the result of the merge: see `StoredMerge`
        failure.json             the error of the last merge, if it failed
        failure-KEY.json         the error of the last evaluation by that key, if it failed
        evaluation-KEY.json      the numbers of an evaluator, by what decides them
        evaluation-KEY-HASH.parquet   its outcomes by example, if it has them
        evaluation-KEY-HASH/     its files by name, if it has some
        .evaluation-KEY.partial  the parts of a measurement that goes on; `clean` deletes those left behind
    inputs/SHA256/
        evaluation-KEY.json, ...      the same of an input, by its content
    sweeps/KEY.json              the folder of the sweep with that command

Many processes and machines may write at once, on any shared folder: nothing is locked. A file appears whole,
by a rename, and says nothing of files that are not there yet. Outcomes and files have a hash of themselves in
their names, so two evaluations that differ (on another graphics card) never mix: the last JSON file counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mecha_exp.documents import DocumentError, read_json, typed
from mecha_exp.errors import StoreError
from mecha_exp.lab.content_hash import content_is
from mecha_exp.lab.stored_results import StoredEvaluation, StoredMerge
from mecha_exp.system.atomic_write import atomic_write, atomic_write_text
from mecha_exp.system.texts import json_hash
from mecha_exp.system.write_errors import cause_of, existing_folder

VERSION = 1
STORE_FILE = "store.json"
"""The file that marks a folder as a store."""
_MERGE = "merge.json"

T = TypeVar("T")


@dataclass(frozen=True)
class _Header:
    """The content of `store.json`."""

    version: int = VERSION


@dataclass(frozen=True)
class _Evaluation:
    """What is kept of an evaluation in JSON.

    Attributes:
        metrics, checksum: as of `StoredEvaluation`.
        outcomes: whether there are any.
        evaluator: the key.
        beside: the name of the folder of its files, and of the file of its outcomes without its suffix.
        files: the SHA-256 of each file by its name.
    """

    metrics: dict[str, float]
    outcomes: bool
    checksum: str
    evaluator: str = ""
    beside: str = ""
    files: dict[str, str] = field(default_factory=dict)


class ResultStore:
    """The results in a folder.

    Raises:
        StoreError: a newer version wrote the store, or it cannot be written; from any method.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.name = str(folder)
        header = _read(self.folder / STORE_FILE, _Header)
        if header is not None and header.version != VERSION:
            raise StoreError(
                f"the store {self.name} was written by a newer mecha_exp (format {header.version}; this one "
                f"reads {VERSION}). Use that version, or another folder with store=..."
            )

    @property
    def shared_folder(self) -> Path | None:
        """The folder that other machines must see to share the store; None where an address is enough."""
        return self.folder

    def __iter__(self) -> Iterator[StoredMerge]:
        """Iterate over all stored merges."""
        for path in sorted((self.folder / "points").glob(f"*/{_MERGE}")):
            stored = self.get(path.parent.name)
            if stored is not None:
                yield stored

    def fetch(self, signatures: Iterable[str]) -> None:
        """Load the results of points in one go. There is nothing to do for a folder."""

    def flush(self) -> None:
        """Wait until everything is where others find it. There is nothing to do for a folder."""

    def get(self, signature: str) -> StoredMerge | None:
        """The merge with a signature, or None. Does not check the model's file."""
        return _read(self._point(signature) / _MERGE, StoredMerge)

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
        return next(iter(self.failures(signature, evaluations).values()), None)

    def failures(self, signature: str, evaluations: Iterable[str] = ()) -> dict[str, str]:
        """The errors of a point: of the merge by the key "", and of these evaluations by theirs."""
        errors: dict[str, str] = {}
        for key in ("", *evaluations):
            stored = _read(self._failure(signature, key), dict[str, str])
            if stored and key in stored:
                errors[key] = stored[key]
        return errors

    def put_failure(self, signature: str, error: str, evaluation: str = "") -> None:
        """Store that a point failed: its merge, or the evaluation with this key."""
        self._write(self._failure(signature, evaluation), {evaluation: error})

    def clear_failure(self, signature: str, evaluations: Iterable[str] = ()) -> None:
        """Forget that the merge of a point failed, and these evaluations; what else failed is kept."""
        for key in ("", *evaluations):
            self._remove(self._failure(signature, key))

    def evaluation(self, key: str, signature: str = "", *, content: str = "") -> StoredEvaluation | None:
        """What an evaluator measured of a point, or of an input with that content (its SHA-256).

        None if it is not stored, or if a file was damaged since.
        """
        path = self._evaluation(key, signature, content)
        fields = _read(path, _Evaluation)
        if fields is None:
            return None
        try:
            beside = path.with_name(fields.beside or path.stem)
            outcomes = _outcomes_file(beside).read_bytes() if fields.outcomes else None
            files = {name: beside / name for name in fields.files}
            stored = StoredEvaluation(fields.metrics, outcomes, files)
            intact = all(content_is(file, fields.files[name]) for name, file in files.items())
            return stored if intact and stored.checksum == fields.checksum else None
        except (OSError, ValueError):  # the name of a file that is none
            return None

    def put_evaluation(
        self, key: str, measured: StoredEvaluation, signature: str = "", *, content: str = ""
    ) -> None:
        """Store what an evaluator measured of a point, or of an input."""
        path, contents = self._evaluation(key, signature, content), measured.contents()
        hashes = {name: hashlib.sha256(file).hexdigest() for name, file in contents.items()}
        version = json_hash([measured.checksum, hashes])[:16]
        beside = path.with_name(f"{path.stem}-{version}")
        files = {beside / name: file for name, file in contents.items()}
        if measured.outcomes is not None:
            files[_outcomes_file(beside)] = measured.outcomes
        fields = _Evaluation(
            dict(measured.metrics), measured.outcomes is not None, measured.checksum, key, beside.name, hashes
        )
        self._write(path, asdict(fields), files)
        self.forget_parts(key, signature, content=content)

    def forget_parts(self, key: str, signature: str = "", *, content: str = "") -> None:
        """Delete what is kept of a measurement that does not go on."""
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
        sweep = _read(self._sweeps / f"{key}.json", dict[str, str])
        folder = Path(sweep["folder"]) if sweep and "folder" in sweep else None
        if folder is None or not os.path.isdir(folder):  # noqa: PTH112, False for a name that is too long
            return None
        return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder

    def put_sweep(self, key: str, folder: Path) -> None:
        """Store the folder of the sweep with a command."""
        self._write(self._sweeps / f"{key}.json", {"folder": str(folder.absolute())})

    def points(self) -> list[Path]:
        """The folder of every point, named by its signature."""
        return sorted(path for path in (self.folder / "points").glob("*") if path.is_dir())

    def lost_sweeps(self) -> list[Path]:
        """The files of sweeps whose folders are gone."""
        files = sorted(self._sweeps.glob("*.json"))
        return [path for path in files if self.sweep_folder(path.stem) is None]

    @property
    def _sweeps(self) -> Path:
        """The folder of what is known of sweeps."""
        return self.folder / "sweeps"

    def _point(self, signature: str) -> Path:
        return self.folder / "points" / signature

    def _failure(self, signature: str, evaluation: str) -> Path:
        name = f"failure-{_short_hash(evaluation)}.json" if evaluation else "failure.json"
        return self._point(signature) / name

    def _evaluation(self, key: str, signature: str, content: str) -> Path:
        folder = self.folder / "inputs" / content if content else self._point(signature)
        return folder / f"evaluation-{_short_hash(key)}.json"

    def _remove(self, path: Path) -> None:
        """Delete a file; one that cannot be deleted is left."""
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

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
                f"the store {self.name} cannot be written: {cause}. The result is in the run's folder, but "
                "it will be computed again. Another folder is chosen with store=..."
            ) from error


def _outcomes_file(beside: Path) -> Path:
    """The file that holds the outcomes of an evaluation."""
    return beside.with_name(f"{beside.name}.parquet")


def _short_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _read(path: Path, kind: type[T]) -> T | None:
    """What a file says; None if it is missing or damaged, or a newer version wrote it."""
    try:
        return typed(read_json(path), kind)
    except (OSError, DocumentError):
        return None

"""`sweep.json`: the data that all points of a sweep share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mecha_exp.documents import DocumentError, read_json, typed
from mecha_exp.errors import ConfigError
from mecha_exp.paths import tracking_experiment, tracking_uri
from mecha_exp.runs.record import FAILED, Record, load_all, write_json
from mecha_exp.tracking.database import SQLITE

SWEEP_FILE = "sweep.json"
FOLDER_TAG = "folder"
RUNNING = "RUNNING"
LOCKED = "sweep"
"""The stem of the name of a folder's lock file."""


@dataclass(frozen=True)
class Tracking:
    """The MLflow store and experiment; runs are not logged if `uri` is None."""

    uri: str | None
    experiment: str

    @classmethod
    def of(cls, section: Any) -> Tracking:
        """What the section `tracking` of a configuration says; what it leaves empty has its default."""
        uri = tracking_uri() if section.uri == "" else section.uri
        return cls(uri, tracking_experiment() if section.experiment == "" else section.experiment)

    @property
    def is_gone(self) -> bool:
        """Whether the store is a database whose file does not exist."""
        uri = self.uri or ""
        return uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).exists()

    @property
    def place(self) -> str:
        """The store and the experiment as one string; empty if runs are not logged."""
        return f"{self.uri} {self.experiment}" if self.uri else ""


@dataclass
class Sweep:
    """The data that all points of a sweep share, saved in the sweep's folder for other processes.

    Attributes:
        title: the sweep's name.
        swept: the configuration keys that differ between the points.
        command: the words of the command line.
        points: the number of points; 0 where a search decides it.
        parent_run: the id of the sweep's MLflow run, if it is tracked.
        tracking_error: why the sweep is not tracked although it should be.
        mode: of our sweeper, such as `zip`.
        complete: whether every point is merged, shown and tracked, so that a new start has nothing to do.
        underway: whether the sweep has begun and not come to its end, be it that it was interrupted.
        tracked_in: the store and the experiment of the MLflow run.
        notes: remarks for the table.
        input_runs: the ids of the MLflow runs of the inputs, by their names.
        reference: the reference point of the hypervolume of several objectives; empty for the worst values.
        at_random: the numbers of the points that a search drew at random.
        given: the numbers of the points with which a search began: those that were known, or enqueued.
        logarithmic: the keys that a search draws by their logarithm; None of other sweeps.
        sheet: the keys of columns, rows and pages of contact sheets; empty leaves the choice.
    """

    title: str
    swept: list[str]
    command: list[str]
    points: int
    parent_run: str | None = None
    tracking_error: str | None = None
    complete: bool = False
    underway: bool = False
    mode: str = "grid"
    tracked_in: str = ""
    notes: list[str] = field(default_factory=list)
    input_runs: dict[str, str] = field(default_factory=dict)
    reference: list[float] = field(default_factory=list)
    at_random: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    logarithmic: list[str] | None = None
    sheet: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write `sweep.json`."""
        write_json(folder / SWEEP_FILE, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """Read `sweep.json`.

        Raises:
            ConfigError: the folder holds no sweep.
        """
        try:
            return typed(read_json(folder / SWEEP_FILE), cls)
        except (OSError, DocumentError) as error:
            raise ConfigError(f"{folder} holds no sweep: {error}.") from None

    @classmethod
    def find(cls, folder: Path) -> Sweep | None:
        """Read `sweep.json`; None where there is none that can be read."""
        try:
            return cls.load(folder)
        except ConfigError:
            return None

    def records(self, folder: Path) -> dict[Path, Record]:
        """The records of the points, by folder, without those of an earlier, larger sweep."""
        numbers = {folder / str(number) for number in range(self.points)}

        def is_ours(path: Path) -> bool:
            return not self.points or path in numbers or path.parent != folder or not path.name.isdecimal()

        return {path: record for path, record in load_all(folder).items() if is_ours(path)}

    def all_records(self, folder: Path, *, ended: bool = False) -> dict[Path, Record]:
        """The records of all points, by folder; of a sweep at its end, one without a record failed.

        Args:
            folder: the folder of the sweep.
            ended: whether the sweep is known to have come to its end.
        """
        records = self.records(folder)
        lost = [n for n in range(self.points) if folder / str(n) not in records]
        if not lost:
            return records
        from mecha_exp.checkpoint.transaction.lock import is_in_use  # imports torch

        if not ended and (self.underway or is_in_use(folder / LOCKED)):
            return records
        missing = lost[: max(self.points - len(records), 0)]
        return records | {folder / str(n): _lost(n) for n in missing}


def finished_points(records: Mapping[Path, Record]) -> dict[Path, int]:
    """The folders of the finished points of a sweep, with the place of each among all records."""
    return {path: number for number, path in enumerate(records) if records[path].finished}


def _lost(number: int) -> Record:
    return Record(f"point {number}", FAILED, "it left no record: see the messages above")

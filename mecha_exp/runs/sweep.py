"""What the points of a sweep share, on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mecha_exp.errors import ConfigError
from mecha_exp.runs.record import FAILED, Record, load_all, write_json
from mecha_exp.tracking.database import SQLITE

SWEEP_FILE = "sweep.json"
FOLDER_TAG = "folder"
RUNNING = "RUNNING"
LOCKED = "sweep"
"""The name that a folder's lock is called after."""


@dataclass(frozen=True)
class Tracking:
    """Where runs are logged: nowhere, if `uri` is None."""

    uri: str | None
    experiment: str

    @property
    def is_gone(self) -> bool:
        """Whether it is a database whose file is not there."""
        uri = self.uri or ""
        return uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).exists()

    @property
    def place(self) -> str:
        """The store and the experiment; nothing where runs are not logged."""
        return f"{self.uri} {self.experiment}" if self.uri else ""


@dataclass
class Sweep:
    """What the points of a sweep share; `sweep.json` in its folder, where other processes find it.

    Attributes:
        title: what it is called.
        swept: the configuration keys that differ between the points.
        command: what was typed.
        points: how many there should be; 0 where a search decides that.
        parent_run: the id of its MLflow run, if it is tracked.
        tracking_error: why it is not, if it should be.
        mode: of our sweeper, such as `zip`.
        complete: whether every point is there, shown and tracked, so that a new start has nothing to do.
        tracked_in: the store and the experiment of that run.
    """

    title: str
    swept: list[str]
    command: list[str]
    points: int
    parent_run: str | None = None
    tracking_error: str | None = None
    complete: bool = False
    mode: str = "grid"
    tracked_in: str = ""

    def save(self, folder: Path) -> None:
        """Write `sweep.json`."""
        write_json(folder / SWEEP_FILE, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """What `save` wrote.

        Raises:
            ConfigError: the folder holds no sweep.
        """
        try:
            return cls(**json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder} holds no sweep: {error}.") from None

    def records(self, folder: Path) -> dict[Path, Record]:
        """The records of its points, by folder; not those of an earlier sweep there that had more."""
        numbers = {folder / str(number) for number in range(self.points)}

        def is_ours(path: Path) -> bool:
            return not self.points or path in numbers or path.parent != folder or not path.name.isdecimal()

        return {path: record for path, record in load_all(folder).items() if is_ours(path)}

    def all_records(self, folder: Path, *, ended: bool = False) -> list[Record]:
        """The records of all points: one that left none has failed, unless the sweep is still running.

        Args:
            folder: the folder of the sweep.
            ended: whether the sweep is known to have run.
        """
        from mecha_exp.checkpoint.transaction.lock import is_in_use  # it brings torch

        records = self.records(folder)
        lost = [n for n in range(self.points) if folder / str(n) not in records]
        missing = [_lost(n) for n in lost][: max(self.points - len(records), 0)]
        if not ended and is_in_use(folder / LOCKED):
            missing = []
        return [*records.values(), *missing]


def _lost(number: int) -> Record:
    return Record(f"point {number}", FAILED, "it left no record: see the messages above")

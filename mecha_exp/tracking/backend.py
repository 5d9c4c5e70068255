"""The interface of tracking stores, and the entries of a run that they write."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from mecha_exp.errors import TrackingError
from mecha_exp.system.write_errors import write_sentence

CONFIG_FOLDER = "config"


def now() -> int:
    """The time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True)
class Entries:
    """What is logged to a run at once, in names and values that MLflow accepts.

    Attributes:
        metrics: numbers by name.
        time: of the metrics, in milliseconds since 1970. Of two values of one metric the later one counts.
        parameters, tags: texts by name.
        datasets: the digest of what each split was measured by, by evaluator and split.
        histories: the values of a metric by step, by its name.
        began: the time of the histories: what is logged again with the same time is there once.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    time: int = field(default_factory=now)
    parameters: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[tuple[str, str], str] = field(default_factory=dict)
    histories: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    began: int = 0

    @property
    def measured(self) -> list[tuple[str, float, int, int]]:
        """Each value with its name, its time and its step; the step is 0 of a metric without steps."""
        by_step = [
            (name, value, self.began, step)
            for name, values in self.histories.items()
            for step, value in values.items()
        ]
        return [*((name, value, self.time, 0) for name, value in self.metrics.items()), *by_step]


class Backend(ABC):
    """An experiment of a tracking store, with what is needed of MLflow's client."""

    has_transactions = False
    """Whether all that is written within `transaction` is kept, or nothing of it."""
    writers = 1
    """How many runs may be logged at a time, from as many threads."""

    def transaction(self) -> AbstractContextManager[None]:
        """Write what follows together, where `has_transactions`; else each thing by itself."""
        return nullcontext()

    @abstractmethod
    def start(self, name: str, tags: Mapping[str, str]) -> str:
        """Create a run that goes on; returns its id."""

    @abstractmethod
    def log(
        self, name: str, status: str, times: tuple[int, int], entries: Entries, artifacts: Sequence[Path]
    ) -> str:
        """Create a run that has ended; returns its id."""

    @abstractmethod
    def add(
        self, run_id: str, entries: Entries, artifacts: Sequence[Path], status: str | None = None
    ) -> None:
        """Add entries and artifacts to a run, and end it if a status is given."""

    @abstractmethod
    def delete(self, run_id: str) -> None:
        """Mark a run as deleted."""

    @abstractmethod
    def describe(self, tags: Mapping[str, str]) -> None:
        """Set tags of the experiment."""

    @abstractmethod
    def status(self, run_id: str) -> str | None:
        """The status of a run; None if there is no such run, or it is deleted."""

    @abstractmethod
    def runs_with(self, tag: str, value: str) -> dict[str, str]:
        """The status of each run whose tag has this value, by run id."""

    @abstractmethod
    def running(self, tag: str) -> dict[str, str]:
        """The value of a tag, for each run that has it and goes on, by run id."""


def local_folder(address: str) -> Path | None:
    """The folder that an artifact address means on this machine; None if it is elsewhere.

    >>> local_folder("s3://bucket/runs"), local_folder("/srv/runs")
    (None, PosixPath('/srv/runs'))
    """
    if address.startswith("file:"):
        return Path(url2pathname(urlsplit(address).path))
    return None if ":" in address else Path(address)


def place_of(artifact: Path) -> str | None:
    """The folder of a run's artifacts in which a file belongs: `config` for those of Hydra."""
    return CONFIG_FOLDER if artifact.parent.name == ".hydra" else None


def copy_artifacts(artifacts: Sequence[Path], folder: Path) -> None:
    """Copy files and folders into the folder of a run's artifacts; files of the same names are replaced."""
    for place in {place_of(path) or "" for path in artifacts}:
        (folder / place).mkdir(parents=True, exist_ok=True)
    for path in artifacts:
        target = folder / (place_of(path) or "")
        if path.is_dir():
            shutil.rmtree(target / path.name, ignore_errors=True)
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


@contextmanager
def tracking_errors(uri: str) -> Iterator[None]:
    """Turn every exception of MLflow or its database into a TrackingError."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        sentence = write_sentence(error) if isinstance(error, OSError) else None
        message = sentence or str(error).strip().partition("\n")[0] or type(error).__name__
        raise TrackingError(f"the MLflow store {uri} cannot be used: {message.rstrip('.')}.") from error

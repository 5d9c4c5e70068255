"""A share of a sweep in a worker: its points are merged in one pass and run as on one machine."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import cloudpickle
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from mecha_exp.app.batch import Merged
from mecha_exp.app.config.execution import Callbacks
from mecha_exp.app.config.jobs import Composed, Jobs
from mecha_exp.app.launchers.onepass import OnePass, PointOrError, Portion
from mecha_exp.app.point import Point
from mecha_exp.app.tracking import EndedRun, Tracker
from mecha_exp.app.workbench import Workbench, workbench
from mecha_exp.cluster.actors import Actor
from mecha_exp.cluster.claims import Claims
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.isolation.pool import pools_on
from mecha_exp.runs.sweep import Tracking

_SESSION = "session.pickle"


@dataclass(frozen=True)
class Session:
    """The data that all shares of a sweep have in common; workers read it from the folder of the claims.

    Attributes:
        config: the configuration of the sweep.
        store: the folder of the store, which workers must see; None without one, or with one at an address.
        make_actor: what the workers of an evaluator run on; None for processes of their share's machine.
    """

    config: DictConfig
    store: Path | None
    make_actor: Callable[[], Actor] | None = None

    def keep(self, folder: Path) -> None:
        """Write it into the folder of the claims."""
        (folder / _SESSION).write_bytes(cloudpickle.dumps(self))


def run_share(claims: Claims, jobs: Jobs) -> None:
    """Run the points of a share that no other worker has taken.

    Args:
        claims: the claims of the sweep, with the session in their folder.
        jobs: the points of the share.

    Raises:
        ConfigError: this machine does not see the store.
        OSError: a record cannot be written.
    """
    session: Session = pickle.loads((claims.folder / _SESSION).read_bytes())
    if session.store is not None and not session.store.is_dir():
        raise ConfigError(
            f"the worker on {platform.node()} does not see the store {session.store}. Choose a store=... in "
            "a folder that all machines of the cluster share, or store=null."
        )
    bench = workbench(session.config.store, session.config.rerun)
    share = _Share(session.config, claims, bench)
    with pools_on(session.make_actor):
        try:
            share.launch(jobs)
        finally:
            bench.measurements.end()  # this process may get a point again that it left to a lost worker
    bench.flush()
    for number in jobs.numbers:  # what is not taken was finished by a worker that was lost right after
        if share.takes(number):
            claims.finish(number)


class _Share(OnePass):
    """Runs those of its points that it can take. The head tracks them, so that one process alone does."""

    first_points = None

    def __init__(self, config: DictConfig, claims: Claims, bench: Workbench) -> None:
        super().__init__(config, Callbacks(config))
        self._claims, self._bench = claims, bench
        self._taken: dict[int, bool] = {}
        self._taking = Lock()

    def takes(self, number: int) -> bool:
        """Take a point; the answer stays the same, also when another worker that has it is lost."""
        with self._taking:
            if number not in self._taken:
                self._taken[number] = self._claims.take(number)
            return self._taken[number]

    def complete(
        self, jobs: Jobs, portions: Iterable[Portion], bench: Workbench, tracker: Tracker
    ) -> Iterator[tuple[int, JobReturn]]:
        """Merge points and run them. A point that an evaluator's worker begins with is taken then."""
        numbers: dict[str, list[int]] = {}
        bench.measurements.is_wanted = lambda point: any(map(self.takes, numbers[point.digest]))
        for points in portions:
            for index, point in points.items():
                if isinstance(point, Point):
                    numbers.setdefault(point.digest, []).append(jobs.numbers[index])
            yield from super().complete(jobs, [points], bench, tracker)

    def run(
        self, job: Composed, point: PointOrError, result: Merged | Exception | None, tracker: Tracker
    ) -> JobReturn:
        """Run a point unless another worker has taken it."""
        number = int(job.config.hydra.job.num)
        if not self.takes(number):
            return JobReturn(status=JobStatus.COMPLETED)
        returned = super().run(job, point, result, _LaterTracker(Tracking(None, "")))
        self._bench.flush()  # the head ends the workers once all points are finished
        self._claims.finish(number)
        return returned


class _LaterTracker(Tracker):
    """Leaves the logging of runs to the head of the sweep."""

    def add(self, run: EndedRun) -> None:
        """Do nothing."""

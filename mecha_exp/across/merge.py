"""A merge as its options say: in this process, one task of a merge by many, or all tasks and the commit."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from mecha_exp.across.shares import Share, SharedMerge
from mecha_exp.across.task import Made, Task, make, make_share
from mecha_exp.across.workers import workers_for
from mecha_exp.checkpoint.transaction.heartbeat import free_silent_locks
from mecha_exp.checkpoint.transaction.paths import sibling
from mecha_exp.checkpoint.transaction.recovery import require_unused
from mecha_exp.cluster import LostWorker, Workers
from mecha_exp.engine import MergeReport, Plan
from mecha_exp.engine import run_plan as run_here
from mecha_exp.engine.merge import sink_of
from mecha_exp.engine.runtime.context import Progress
from mecha_exp.engine.sinks import Sink
from mecha_exp.errors import MechaError, MergeError, counted

ATTEMPTS = 3
"""How often a task is started whose worker is lost."""


def run_plan(
    planned: Plan, progress: Progress = lambda key, nbytes: None, plugins: Sequence[str] = ()
) -> MergeReport:
    """Run a plan. With `engine.across` several tasks make its files, and with `engine.task` one of them.

    The tasks make whole files of the output under hidden names, each with a journal of its own; what an
    interrupted merge has finished is not made again. Then this process commits them: index, small files and
    card are written, and all appears at once. The bytes are those of a merge in one process.

    Args:
        planned: an open plan.
        progress: told of each key that is finished, and of how many bytes it read.
        plugins: that define methods of the recipe.

    Raises:
        MergeError: the output cannot be made by several; a worker is lost again and again.
        MechaError: as the engine's `run_plan`.
    """
    options = planned.options
    if options.across is None:
        return run_here(planned, progress)
    merge = SharedMerge.of(planned, options.across)
    if options.task is not None:
        return make_share(merge, merge.shares[options.task - 1], progress)
    started = time.perf_counter()
    results = _Head(merge, progress, tuple(plugins)).make_all()
    return _with_totals(commit(merge), results, time.perf_counter() - started)


def commit(merge: SharedMerge) -> MergeReport:
    """Put the finished files of all tasks in place, with index, small files and card."""
    return run_here(merge.plan, open_sink=_open_finished)


def _open_finished(planned: Plan, number: int) -> Sink:
    sink = sink_of(planned, number)
    missing = sum(key.structure.is_used and key.key not in sink.finished for key in planned.keys)
    if missing:
        sink.suspend()
        raise MergeError(
            f"{planned.jobs[number].output}: {missing} of {counted(len(planned.keys), 'key')} "
            f"{'is' if missing == 1 else 'are'} not made, though all "
            "tasks have ended. Do all machines see one folder? Start the merge again: it goes on."
        )
    return sink


class _Head:
    """Starts the tasks of a merge, starts those again whose workers are lost, and tells of the progress."""

    def __init__(self, merge: SharedMerge, progress: Progress, plugins: tuple[str, ...]) -> None:
        self._merge, self._progress, self._plugins = merge, progress, plugins
        self._folder = merge.staged
        self._told: set[str] = set()

    def make_all(self) -> list[Made]:
        """Make all files that are not finished.

        Raises:
            MergeError: the error of a task.
        """
        waiting = [share for share in self._merge.shares if not self._is_made(share)]
        self._tell()
        if not waiting:
            return []
        jobs = sibling(self._merge.destination.path, "jobs")
        has_failed = False
        try:
            with workers_for(self._merge.plan.options, len(waiting), jobs) as workers:
                for share in waiting:
                    free_silent_locks(share.paths(self._folder), self._merge.token)
                require_unused(self._merge.destination.path, self._folder)  # jobs that were left have ended
                return self._make(waiting, workers)
        except Exception:
            has_failed = True
            raise
        finally:
            if not has_failed:
                shutil.rmtree(jobs, ignore_errors=True)  # logs of what went well, or was interrupted

    def _make(self, waiting: list[Share], workers: Workers) -> list[Made]:
        results: list[Made] = []
        attempts = {share.number: 1 for share in waiting}
        running = dict(
            zip(workers.start(make, [(self._task(share),) for share in waiting]), waiting, strict=True)
        )
        while running:
            for number, result in workers.ended():
                share = running.pop(number)
                if isinstance(result, LostWorker) and attempts[share.number] < ATTEMPTS:
                    attempts[share.number] += 1
                    share.free_locks(self._folder)
                    running[workers.start(make, [(self._task(share),)])[0]] = share
                elif isinstance(result, Exception):
                    raise self._failed(share, result) from result
                else:
                    results.append(result)
            self._tell()
        return results

    def _task(self, share: Share) -> Task:
        return Task.of(self._merge, share.number, self._plugins)

    def _is_made(self, share: Share) -> bool:
        return share.is_made(self._folder, self._merge.token)

    def _tell(self) -> None:
        """Tell of the keys that have been finished since the last time."""
        for share in self._merge.shares:
            for file in share.files:
                if all(key.key in self._told for key in file.keys):
                    continue
                finished = file.finished(self._folder, self._merge.token)
                for key in file.keys:
                    if key.key in finished and key.key not in self._told:
                        self._told.add(key.key)
                        self._progress(key.key, self._merge.plan.bytes_of(key))

    def _failed(self, share: Share, error: Exception) -> MechaError:
        kind = type(error) if isinstance(error, MechaError) else MergeError
        return kind(
            f"task {share.number} of {len(self._merge.shares)}: {error}\nWhat the tasks have finished is "
            f"kept beside {self._merge.destination.path}, and the same command goes on from there."
        )


def _with_totals(report: MergeReport, results: Sequence[Made], seconds: float) -> MergeReport:
    """The report of the commit, which found every key finished, with what the tasks did."""
    fresh = sum(task.keys - task.resumed_keys for task in results)
    return replace(
        report,
        bytes_read=sum(task.read for task in results),
        bytes_written=sum(task.written for task in results),
        seconds=seconds,
        resumed_keys=report.resumed_keys - fresh,
    )

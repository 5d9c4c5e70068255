"""One task of a merge by many: it plans the whole model, and makes its share of the files."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from mecha_exp.across.shares import Share, SharedMerge
from mecha_exp.checkpoint.sidecars import SmallFiles
from mecha_exp.checkpoint.transaction.heartbeat import free_silent_locks, heartbeat
from mecha_exp.engine import EngineOptions, Job, MergeReport, Plan, plan, run_plan
from mecha_exp.engine.merge import header_of
from mecha_exp.engine.planner.by_key import parse_output_dtype
from mecha_exp.engine.runtime.context import Progress
from mecha_exp.engine.sinks import Sink
from mecha_exp.errors import MergeError
from mecha_exp.graph.by_key import ByKey
from mecha_exp.plugins import load_plugins
from mecha_exp.recipe.text import deserialize, serialize
from mecha_exp.system.memory import PeakMemory


@dataclass(frozen=True)
class Made:
    """What one task did.

    Attributes:
        read, written: bytes.
        seconds: wall time.
        keys: how many keys it made.
        processor: seconds of processor time, with the plan.
        resumed_keys: how many of them an interrupted run had finished.
        peak: the most memory that it had at a time, in bytes.
    """

    read: int
    written: int
    seconds: float
    processor: float
    keys: int
    resumed_keys: int
    peak: int


@dataclass(frozen=True)
class Task:
    """A share of a merge in a form that goes to other machines.

    Attributes:
        number: of the share, from 1 to `options.across`.
        recipe: its text.
        output: the folder.
        dtype: of the output by selectors; empty for that of the first input.
        header: the metadata in the header of each file.
        token: of the sender; the worker must find the same.
        plugins: that define methods of the recipe.
    """

    number: int
    recipe: str
    output: Path
    dtype: Mapping[str, str]
    header: Mapping[str, str]
    statistics: bool
    durable: bool
    shard_size: int | None
    small_files: SmallFiles
    options: EngineOptions
    token: str
    plugins: tuple[str, ...] = ()

    @classmethod
    def of(cls, merge: SharedMerge, number: int, plugins: tuple[str, ...]) -> Task:
        """The task of a share."""
        job = merge.plan.jobs[0]
        return cls(
            number,
            serialize(job.recipe),
            merge.destination.path,
            _dtype_words(job.dtype),
            header_of(merge.plan, 0),
            job.statistics,
            job.durable,
            job.shard_size,
            job.small_files,
            merge.plan.options,
            merge.token,
            plugins,
        )

    @property
    def job(self) -> Job:
        """What the engine makes, without the card, which is written at the end."""
        return Job(
            deserialize(self.recipe),
            self.output,
            parse_output_dtype(self.dtype or None),
            self.header,
            statistics=self.statistics,
            durable=self.durable,
            shard_size=self.shard_size,
            small_files=self.small_files,
        )


def make(task: Task) -> Made:
    """Make the share of a task, on the machine that this is called on.

    Raises:
        MergeError: this machine sees other inputs, or has other code, than the sender of the task.
        MechaError: as `plan` and `run_plan`.
    """
    load_plugins(task.plugins)
    started = time.process_time()
    with PeakMemory() as memory, plan([task.job], task.options) as planned:
        merge = SharedMerge.of(planned, task.options.across or 1)
        if merge.token != task.token:
            raise MergeError(
                f"{platform.node()} would make other bytes than the machine that started the merge: it sees "
                "other files of the models (path, size, time of change) or has another version of mecha_exp, "
                "of torch or of a merge method. Let all machines share one folder and one environment."
            )
        report = make_share(merge, merge.shares[task.number - 1])
    return Made(
        report.bytes_read,
        report.bytes_written,
        report.seconds,
        time.process_time() - started,
        report.keys,
        report.resumed_keys,
        memory.peak,
    )


def make_share(
    merge: SharedMerge, share: Share, progress: Progress = lambda key, nbytes: None
) -> MergeReport:
    """Make the files of a share and leave them, complete and hidden, for the commit."""
    (layout,) = merge.plan.layouts
    own = {key.key: layout[key.key] for key in share.keys}
    mine = replace(merge.plan, keys=share.keys, layouts=(own,))
    paths = share.paths(merge.staged)
    free_silent_locks(paths, merge.token)
    with heartbeat(paths):
        return run_plan(mine, progress, open_sink=partial(_open_share, merge, share))


def _open_share(merge: SharedMerge, share: Share, planned: Plan, number: int) -> Sink:
    names = {file.name for file in share.files}
    return merge.destination.open_shards(
        names, header_of(planned, number), planned.jobs[number].durable, merge.token
    )


def _dtype_words(dtype: torch.dtype | ByKey | None) -> dict[str, str]:
    if isinstance(dtype, ByKey):
        return {selector: str(word) for selector, word in dtype.words}
    return {"default": str(dtype).removeprefix("torch.")} if dtype is not None else {}

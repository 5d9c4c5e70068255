"""Many points, few passes: points are merged together, so that inputs are read and common work is done once.

Points over models with other keys or shapes have a pass of their own (`engine/batches.py`). A pass takes as
many points as fit: models that are kept in memory the engine's memory budget, files the number that a process
may open. The next ones are another wave, which reads the inputs again. A point that cannot be planned is left
out; where the shared work fails, its points are tried by halves until the failing one is alone.
"""

from __future__ import annotations

import csv
import io
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mecha_exp.app.point import Point
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.checkpoint.shards import Layout
from mecha_exp.checkpoint.transaction.paths import PARTIAL, disk_bytes, sibling
from mecha_exp.engine import Job, MergeReport, Plan, plan, run_plan
from mecha_exp.engine.planner.batches import batches
from mecha_exp.engine.planner.plan import size_of
from mecha_exp.engine.report import About
from mecha_exp.engine.statistics import summarise
from mecha_exp.errors import CheckpointError
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.sources.source import infos_of
from mecha_exp.system.file_limit import openable_files
from mecha_exp.system.memory import PeakMemory
from mecha_exp.system.progress import human_bytes

log = logging.getLogger(__name__)

MOST_POINTS = 64
"""In one pass: the loop for more of them takes longer to compile than reading the inputs again."""

FILES_A_POINT = 4
"""Its partial file, twice while it is flushed, its journal and its lock."""

Progress = Callable[[Plan], AbstractContextManager[Callable[[str, int], None]]]


@dataclass(frozen=True)
class Wanted:
    """A point to be made.

    Attributes:
        point: what.
        in_memory: whether the model is to be given as a state dict, where no file of it is kept.
        metadata: for the file's header, beside the recipe.
    """

    point: Point
    in_memory: bool
    metadata: Mapping[str, str] = field(default_factory=dict)

    def job(self) -> Job:
        """What the engine is asked for; a dictionary of its own each time, for an attempt may fail."""
        kept_in_memory: dict[str, torch.Tensor] | None = {} if self.in_memory else None
        output = self.point.output if self.point.output is not None else kept_in_memory
        return self.point.job(output, self.metadata)


@dataclass(frozen=True)
class Made:
    """What a pass gave for a point.

    Attributes:
        metrics: weight statistics, and its share of time and bytes.
        statistics: the weight statistics by block, as CSV.
        warnings: what was odd.
        state_dict: the model, where it was asked for in memory.
    """

    metrics: dict[str, float]
    statistics: str
    warnings: tuple[str, ...]
    state_dict: Mapping[str, torch.Tensor] | None


Outcome = dict[int, Made | Exception]
"""What became of the points of a wave, by their numbers."""


def make(wanted: Sequence[Wanted], progress: Progress) -> Iterator[Outcome]:
    """Make every point, wave by wave.

    A state dict is the caller's from the moment it is given: drop it before asking for the next wave.
    """
    for numbers in _alike(wanted):
        yield from _make(numbers, wanted, progress)


@dataclass(frozen=True)
class Wave:
    """Points that are made in one pass.

    Attributes:
        numbers: of the points.
        read, written: bytes of inputs, and of files.
        held: bytes of the models that are kept in memory.
    """

    numbers: tuple[int, ...]
    read: int
    written: int
    held: int


def survey(wanted: Sequence[Wanted]) -> tuple[list[Wave], Outcome]:
    """The waves that `make` would run, and the points that cannot be made."""
    waves: list[Wave] = []
    failed: Outcome = {}
    for numbers in _alike(wanted):
        sound, bad = _sift(numbers, wanted)
        failed |= bad
        with _planned(sound, wanted) as together:
            parts = _cut(together, sound)
        for part in parts:
            with _planned(part, wanted) as planned:
                held = sum(
                    _held(job, layout) for job, layout in zip(planned.jobs, planned.layouts, strict=True)
                )
                waves.append(Wave(part, planned.bytes_read, planned.bytes_written - held, held))
    return waves, failed


def _alike(wanted: Sequence[Wanted]) -> Iterator[tuple[int, ...]]:
    """The numbers of the points, those together that can share a pass."""
    groups: list[list[int]] = []
    for number, one in enumerate(wanted):
        group = next((g for g in groups if wanted[g[0]].point.options == one.point.options), None)
        groups.append([number]) if group is None else group.append(number)
    for group in groups:
        points = [wanted[number].point for number in group]
        for places in batches([point.recipe for point in points], points[0].options):
            yield tuple(group[place] for place in places)


def _planned(numbers: Sequence[int], wanted: Sequence[Wanted]) -> AbstractContextManager[Plan]:
    options = wanted[numbers[0]].point.options if numbers else None
    return plan([wanted[n].job() for n in numbers], options)


def _make(numbers: Sequence[int], wanted: Sequence[Wanted], progress: Progress) -> Iterator[Outcome]:
    try:
        outcome, rest = _attempt(numbers, wanted, progress)
    except Exception as error:  # of the plan, of a method, or of a file: some point's, and the others go on
        if len(numbers) == 1:
            yield {numbers[0]: error}
            return
        log.info("%d points together: %s", len(numbers), error)
        sound, outcome = _sift(numbers, wanted)
        middle = len(numbers) // 2
        rest = [sound] if outcome else [tuple(numbers[:middle]), tuple(numbers[middle:])]
    if outcome:
        yield outcome
    for part in filter(None, rest):
        yield from _make(part, wanted, progress)


def _attempt(
    numbers: Sequence[int], wanted: Sequence[Wanted], progress: Progress
) -> tuple[Outcome, list[tuple[int, ...]]]:
    """Make the points if one pass has room for them; else what is known, and the parts to go on with."""
    with _planned(numbers, wanted) as planned:
        if full := _lacking_room(planned):
            files = {n for n, job in zip(numbers, planned.jobs, strict=True) if isinstance(job.output, Path)}
            return dict.fromkeys(sorted(files), full), [tuple(n for n in numbers if n not in files)]
        waves = _cut(planned, numbers)
        if len(waves) > 1:
            return {}, waves
        return _run(planned, numbers, wanted, progress), []


def _sift(numbers: Sequence[int], wanted: Sequence[Wanted]) -> tuple[tuple[int, ...], Outcome]:
    """The points that can be planned, and what is wrong with the others; found by halves."""
    try:
        with _planned(numbers, wanted):
            return tuple(numbers), {}
    except Exception as error:
        if len(numbers) == 1:
            return (), {numbers[0]: error}
    middle = len(numbers) // 2
    first, failed = _sift(numbers[:middle], wanted)
    second, more = _sift(numbers[middle:], wanted)
    return first + second, failed | more


def _cut(planned: Plan, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The points in waves that fit the memory budget and the number of open files."""
    waves: list[list[int]] = []
    held = files = 0
    most_files = max(1, openable_files() // FILES_A_POINT)
    for number, job, layout in zip(numbers, planned.jobs, planned.layouts, strict=True):
        size, file = _held(job, layout), isinstance(job.output, Path)
        fits = held + size <= planned.options.memory_budget and files + file <= most_files
        if not waves or not fits or len(waves[-1]) == MOST_POINTS:
            waves.append([])
            held = files = 0
        waves[-1].append(number)
        held, files = held + size, files + file
    return [tuple(wave) for wave in waves]


def _held(job: Job, layout: Layout) -> int:
    return size_of(layout) if isinstance(job.output, dict) else 0


def _lacking_room(planned: Plan) -> CheckpointError | None:
    """What to say where each file has room on its disk, and all of them together have not."""
    wanted: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for job, layout in zip(planned.jobs, planned.layouts, strict=True):
        if isinstance(job.output, Path):
            folder = next(parent for parent in job.output.absolute().parents if parent.exists())
            device = folder.stat().st_dev
            folders[device] = folder
            done = disk_bytes(sibling(job.output, PARTIAL))  # of an interrupted run, which it takes over
            wanted[device] = wanted.get(device, 0) + size_of(layout) - done
    for device, folder in folders.items():
        free = shutil.disk_usage(folder).free
        if wanted[device] > free:
            return CheckpointError(
                f"the models of this sweep need {human_bytes(wanted[device])} in {folder}, where "
                f"{human_bytes(free)} are free. Make room, choose another hydra.sweep.dir=..., or "
                "keep no models with output=none."
            )
    return None


def _run(planned: Plan, numbers: Sequence[int], wanted: Sequence[Wanted], progress: Progress) -> Outcome:
    with PeakMemory() as memory, progress(planned) as advance:
        report = run_plan(planned, advance)
    if report.resumed_keys:
        log.info("resumed: %d of %d keys were already done", report.resumed_keys, report.keys)
    outcome: Outcome = {}
    compared = {model for moments in report.moments for model in moments}
    anatomies = {model: Anatomy.of(infos_of(planned.sources[model])) for model in compared}
    for place, (number, job) in enumerate(zip(numbers, planned.jobs, strict=True)):
        names = wanted[number].point.names
        metrics, statistics = _weight_statistics(report.moments[place], names, anatomies)
        metrics = {**_shares(report, place, len(numbers)), **metrics}
        metrics["memory/peak_bytes"] = float(memory.peak)
        kept = job.output if isinstance(job.output, dict) else None
        outcome[number] = Made(metrics, statistics, _warnings(report, place), kept)
    return outcome


def _shares(report: MergeReport, place: int, points: int) -> dict[str, float]:
    """The figures of a pass as one point's: sums over the points are those of the pass."""
    return {
        "time/merge_seconds": report.seconds / points,
        "io/bytes_read": report.bytes_read / points,
        "io/bytes_written": report.bytes_written / points,
        "io/bytes_per_second": report.bytes_per_second,
        "io/keys": float(report.keys),
        "io/resumed_keys": float(report.resumed_keys),
        "io/points_in_pass": float(points),
        "nonfinite_values": float(report.nonfinite_values[place]),
    }


def _warnings(report: MergeReport, place: int) -> tuple[str, ...]:
    """What concerns all points of a pass, and what concerns this one."""
    shared = [warning for warning in report.warnings if warning.about is not About.NONFINITE_OUTPUT]
    count = report.nonfinite_values[place]
    return (*shared, f"{count} values of the output are not finite") if count else tuple(shared)


def _weight_statistics(
    moments: Mapping[ModelNode, Mapping[str, torch.Tensor]],
    names: Mapping[ModelNode, str],
    anatomies: Mapping[ModelNode, Anatomy],
) -> tuple[dict[str, float], str]:
    """Metrics over the whole model, and a table by block as CSV; nothing where they are not wanted."""
    metrics: dict[str, float] = {}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["input", "block", "distance", "relative_change", "cosine", "norm", "input_norm"])
    for model, by_key in moments.items():
        name = names[model]
        whole = summarise(by_key)[""]
        metrics[f"weights/distance/{name}"] = whole.distance
        metrics[f"weights/relative_change/{name}"] = whole.relative_change
        metrics[f"weights/cosine/{name}"] = whole.cosine
        by_block = summarise(by_key, anatomies[model].block)
        for block, s in {"(all)": whole, **by_block}.items():
            rows.writerow([name, block, s.distance, s.relative_change, s.cosine, s.norm, s.input_norm])
    return metrics, text.getvalue() if moments else ""

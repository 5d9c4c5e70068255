"""Merges many points in few passes, so that the inputs are read once and common work is done once.

Points over models with different keys or shapes go into separate passes (`engine/planner/batches.py`). A pass
takes as many points as fit: the memory budget bounds the models in memory, the limit on open files bounds the
saved ones. The remaining points form the next batch, which reads the inputs again. A point that cannot be
planned is left out; if a merge fails, its points are tried in halves until the failing point is alone.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mecha_exp.across import run_plan
from mecha_exp.app.point import Point
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.checkpoint.dtypes import Layout
from mecha_exp.checkpoint.transaction.paths import PARTIAL, disk_bytes, sibling
from mecha_exp.engine import Job, MergeReport, Plan, plan
from mecha_exp.engine.planner.batches import batches
from mecha_exp.engine.planner.by_key import output_dtype_words
from mecha_exp.engine.planner.plan import size_of
from mecha_exp.engine.report import About
from mecha_exp.engine.statistics import summarise
from mecha_exp.errors import CheckpointError, counted
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.lab.stored_results import ModelFile
from mecha_exp.sources.source import infos_of
from mecha_exp.system.file_limit import openable_files
from mecha_exp.system.memory import PeakMemory
from mecha_exp.system.progress import human_bytes
from mecha_exp.system.texts import csv_text

log = logging.getLogger(__name__)

NOT_FINITE = "not finite"
"""The end of the warning about the output of one point."""

MOST_POINTS = 64
"""The points of a pass. The loop for more of them compiles longer than reading the inputs again takes."""

FILES_A_POINT = 4
"""The open files of a point: its partial file, twice while it is flushed, its journal and its lock."""

Progress = Callable[[Plan], AbstractContextManager[Callable[[str, int], None]]]


@dataclass
class Merged:
    """The merge of a point.

    Attributes:
        metrics: weight statistics, and its share of the pass's time and bytes.
        statistics: the weight statistics by block, as CSV.
        warnings: the warnings of the merge.
        model: what the evaluators measure, a path or a state dict; None if it is not needed or released.
        file: the saved model, if one was saved.
        tags: the commit, the versions of packages and the machine that made it.
        is_recalled: whether it comes from the store.
    """

    metrics: dict[str, float]
    statistics: str
    warnings: Sequence[str]
    model: Path | Mapping[str, torch.Tensor] | None
    file: ModelFile | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    is_recalled: bool = False

    def release(self) -> None:
        """Drop the model: the next batch needs its memory."""
        self.model = None


Outcomes = dict[Point, Merged | Exception]
"""The merge of each point of a batch, or its error."""


@dataclass(frozen=True)
class Batch:
    """Points that are merged in one pass.

    Attributes:
        points: the points.
        read, written: bytes of inputs, and of files.
        held: bytes of the models that stay in memory.
    """

    points: tuple[Point, ...]
    read: int
    written: int
    held: int


def merge_points(points: Sequence[Point], progress: Progress) -> Iterator[Outcomes]:
    """Merge signed points, batch by batch.

    Release every model of a batch before asking for the next one.
    """
    for group in group_by_options(points):
        if full := _lacking_room_for(group):
            saved = [point for point in group if point.output is not None]
            yield dict.fromkeys(saved, full)
            group = tuple(point for point in group if point.output is None)
        for part in _cut(group):  # before they are planned, since a plan grows with the square of its points
            yield from _merge(part, progress)


def _cut(points: tuple[Point, ...]) -> Iterator[tuple[Point, ...]]:
    """Points in parts that a pass takes at most."""
    most = 1 if points and points[0].options.across else MOST_POINTS
    return (points[start : start + most] for start in range(0, len(points), most))


def plan_batches(points: Sequence[Point]) -> tuple[list[Batch], dict[Point, Exception]]:
    """The batches that `merge_points` would run, and the errors of points that cannot be planned."""
    planned_batches: list[Batch] = []
    errors: dict[Point, Exception] = {}
    for group in group_by_options(points):
        for part in _cut(group):
            batches_of_part, failed = _plan_part(part)
            planned_batches += batches_of_part
            errors |= failed
    return planned_batches, errors


def _plan_part(points: tuple[Point, ...]) -> tuple[list[Batch], dict[Point, Exception]]:
    """The batches of points that one pass takes unless memory or files are short, and the errors."""
    try:
        with _planned(points) as planned:
            parts = _fit_batches(planned, points)
            if len(parts) == 1:
                return [_batch(planned, points)], {}
    except Exception:
        sound, failed = _split_failing(points)
        batches, errors = _plan_part(sound) if sound else ([], {})
        return batches, failed | errors
    batches = []
    for part in parts:
        with _planned(part) as planned:
            batches.append(_batch(planned, part))
    return batches, {}


def _batch(planned: Plan, points: tuple[Point, ...]) -> Batch:
    held = sum(map(_held_bytes, planned.jobs, planned.layouts))
    return Batch(points, planned.bytes_read, planned.bytes_written - held, held)


def group_by_options(points: Sequence[Point]) -> Iterator[tuple[Point, ...]]:
    """The points in groups that can share a pass."""
    groups: list[list[Point]] = []
    for point in points:
        group = next((g for g in groups if g[0].options == point.options), None)
        groups.append([point]) if group is None else group.append(point)
    for group in groups:
        for indices in batches([point.recipe for point in group], group[0].options):
            yield tuple(group[index] for index in indices)


def _planned(points: Sequence[Point]) -> AbstractContextManager[Plan]:
    return plan([point.signed_job() for point in points], points[0].options if points else None)


def _merge(points: tuple[Point, ...], progress: Progress) -> Iterator[Outcomes]:
    try:
        outcomes, remaining = _attempt(points, progress)
    except Exception as error:  # in planning, in a method or in a file of some point; the others go on
        if len(points) == 1:
            yield {points[0]: error}
            return
        log.info("%d points together: %s", len(points), error)
        sound, failed = _split_failing(points)
        outcomes = {**failed}
        middle = len(points) // 2
        remaining = [sound] if failed else [points[:middle], points[middle:]]
    if outcomes:
        yield outcomes
    for part in filter(None, remaining):
        yield from _merge(part, progress)


def _attempt(points: tuple[Point, ...], progress: Progress) -> tuple[Outcomes, list[tuple[Point, ...]]]:
    """Merge the points if they fit into one pass; else return the errors, and the parts to go on with."""
    with _planned(points) as planned:
        parts = _fit_batches(planned, points)
        if len(parts) > 1:
            return {}, parts
        return _run(planned, points, progress), []


def _split_failing(points: tuple[Point, ...]) -> tuple[tuple[Point, ...], dict[Point, Exception]]:
    """Split off the points that cannot be planned, by bisection; returns the others, and the errors."""
    try:
        with _planned(points):
            return points, {}
    except Exception as error:
        if len(points) == 1:
            return (), {points[0]: error}
    middle = len(points) // 2
    first, errors = _split_failing(points[:middle])
    second, more = _split_failing(points[middle:])
    return first + second, errors | more


def _fit_batches(planned: Plan, points: Sequence[Point]) -> list[tuple[Point, ...]]:
    """The points in batches that fit the memory budget and the limit on open files."""
    parts: list[list[Point]] = []
    held = files = 0
    most_files = max(1, openable_files() // FILES_A_POINT)
    for point, job, layout in zip(points, planned.jobs, planned.layouts, strict=True):
        size, file = _held_bytes(job, layout), isinstance(job.output, Path)
        fits = held + size <= planned.options.memory_budget and files + file <= most_files
        if not parts or not fits or len(parts[-1]) == MOST_POINTS:
            parts.append([])
            held = files = 0
        parts[-1].append(point)
        held, files = held + size, files + file
    return [tuple(part) for part in parts]


def _held_bytes(job: Job, layout: Layout) -> int:
    return size_of(layout) if isinstance(job.output, dict) else 0


def _lacking_room_for(points: Sequence[Point]) -> CheckpointError | None:
    """The error if each file fits on its disk, but all of them together do not.

    Points with one dtype and one method have files of one size, so one of each is planned.
    """
    needed: dict[int, int] = {}
    folders: dict[int, Path] = {}
    sizes: dict[tuple[object, ...], int] = {}
    for point in points:
        if point.output is None:
            continue
        kind = (output_dtype_words(point.dtype), getattr(point.recipe, "method", None))
        if kind not in sizes:
            sizes[kind] = _size_of_file(point)
        folder = next(parent for parent in point.output.absolute().parents if parent.exists())
        device = folder.stat().st_dev
        folders[device] = folder
        resumed = disk_bytes(sibling(point.output, PARTIAL))  # the output of an interrupted run is reused
        needed[device] = needed.get(device, 0) + sizes[kind] - resumed
    for device, folder in folders.items():
        free = shutil.disk_usage(folder).free
        if needed[device] > free:
            return CheckpointError(
                f"the models of this sweep need {human_bytes(needed[device])} in {folder}, where "
                f"{human_bytes(free)} are free. Make room, choose another hydra.sweep.dir=..., or "
                "keep no models with output=none."
            )
    return None


def _size_of_file(point: Point) -> int:
    """The bytes of a point's tensors; 0 for one that cannot be planned, which its merge reports."""
    try:
        with _planned([point]) as planned:
            return size_of(planned.layouts[0])
    except Exception:
        return 0


def _run(planned: Plan, points: Sequence[Point], progress: Progress) -> Outcomes:
    with PeakMemory() as memory, progress(planned) as advance:
        report = run_plan(planned, advance, points[0].config.get("plugins") or ())
    if report.resumed_keys:
        log.info("resumed: %d of %s were already done", report.resumed_keys, counted(report.keys, "key"))
    outcomes: Outcomes = {}
    compared = {model for moments in report.moments for model in moments}
    anatomies = {model: Anatomy.of(infos_of(planned.sources[model])) for model in compared}
    for index, (point, job) in enumerate(zip(points, planned.jobs, strict=True)):
        metrics, statistics = _weight_statistics(report.moments[index], point.names, anatomies)
        metrics = {**_shares(report, index, len(points)), **metrics}
        metrics["memory/peak_bytes"] = float(memory.peak)
        if error := report.quantisation[index]:
            metrics |= error.metrics
        model = job.output if isinstance(job.output, dict | Path) else None
        outcomes[point] = Merged(metrics, statistics, _warnings(report, index), model)
    return outcomes


def _shares(report: MergeReport, index: int, points: int) -> dict[str, float]:
    """The figures of a pass for one point. The sums over its points are those of the pass."""
    return {
        "time/merge_seconds": report.seconds / points,
        "io/bytes_read": report.bytes_read / points,
        "io/bytes_written": report.bytes_written / points,
        "io/bytes_per_second": report.bytes_per_second,
        "io/keys": float(report.keys),
        "io/resumed_keys": float(report.resumed_keys),
        "io/points_in_pass": float(points),
        "nonfinite_values": float(report.nonfinite_values[index]),
    }


def _warnings(report: MergeReport, index: int) -> list[str]:
    """The warnings about a pass, and about one point of it."""
    shared = [warning for warning in report.warnings if warning.about is not About.NONFINITE_OUTPUT]
    count = report.nonfinite_values[index]
    words = counted(count, "value of the output is", "values of the output are")
    return [*shared, *([f"{words} {NOT_FINITE}"] if count else ())]


def _weight_statistics(
    moments: Mapping[ModelNode, Mapping[str, torch.Tensor]],
    names: Mapping[ModelNode, str],
    anatomies: Mapping[ModelNode, Anatomy],
) -> tuple[dict[str, float], str]:
    """Metrics over the whole model, and a CSV table by block; both empty if nothing was compared."""
    metrics: dict[str, float] = {}
    rows: list[list[object]] = [
        ["input", "block", "distance", "relative_change", "cosine", "norm", "input_norm"]
    ]
    for model, by_key in moments.items():
        name = names[model]
        whole = summarise(by_key)[""]
        metrics |= whole.metrics(name)
        by_block = summarise(by_key, anatomies[model].blocks.__getitem__)
        for block, s in {"(all)": whole, **by_block}.items():
            rows.append([name, block, s.distance, s.relative_change, s.cosine, s.norm, s.input_norm])
    return metrics, csv_text(rows) if moments else ""

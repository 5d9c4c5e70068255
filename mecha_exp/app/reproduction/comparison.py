"""Compares a reproduced result with the original: its bytes or, if no model was kept, its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mecha_exp.app.point import Point
from mecha_exp.app.reproduction.original import Original
from mecha_exp.checkpoint import Checkpoint
from mecha_exp.engine import plan, run_plan
from mecha_exp.engine.statistics import summarise
from mecha_exp.errors import CheckpointError, counted, some
from mecha_exp.lab.content_hash import content_of, size_of


@dataclass
class Outcome:
    """The outcome of reproducing a result.

    Attributes:
        identical: whether the result is the same.
        made: whether it could be merged at all.
        compared: what was compared, in words.
        inputs: the path of each input.
        environment: the versions, features and methods that differ from those of the original.
        differences: what prevents reproducing it, or what came out differently.
    """

    identical: bool = False
    made: bool = False
    compared: str = ""
    inputs: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def compare_bytes(original: Original, point: Point, target: Path, outcome: Outcome) -> None:
    """Write the model with the header of the original, and compare the two files."""
    if original.model is not None and target.exists() and target.samefile(original.model):
        raise CheckpointError(f"{target} is the original: say another file with --output.")
    job = replace(point.job(target.absolute()), metadata=dict(original.metadata), statistics=False)
    with plan([job], point.options) as planned:
        run_plan(planned)
    now, size = content_of(target), size_of(target)
    outcome.compared = f"{size:,} bytes, SHA-256 {now}"
    if now == original.sha256:
        return
    outcome.differences.append(f"the file: SHA-256 was {original.sha256}, is {now}")
    if original.model is not None and original.model.is_file():
        outcome.differences += describe_differences(original.model, target)


def describe_differences(a: Path, b: Path) -> list[str]:
    """The differences of two models: keys, shapes, dtypes, and how many values differ by how much."""
    differences: list[str] = []
    with Checkpoint(a) as first, Checkpoint(b) as second:
        if only := [key for key in first.keys() if key not in second]:
            differences.append(f"keys that are not there any more: {some(only)}")
        if only := [key for key in second.keys() if key not in first]:
            differences.append(f"keys that are new: {some(only)}")
        if first.metadata != second.metadata:
            differences.append("the metadata in the header")
        for key in first.keys():
            if key in second:
                differences += _compare_tensors(key, first.read(key), second.read(key))
    return differences


def _compare_tensors(key: str, a: torch.Tensor, b: torch.Tensor) -> list[str]:
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"{key}: {a.dtype} {tuple(a.shape)} was, {b.dtype} {tuple(b.shape)} is"]
    different = a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)
    if not different.any():
        return []
    count = int(different.reshape(a.numel(), -1).any(dim=1).sum())
    largest = (a.double() - b.double()).abs().nan_to_num().max().item()
    return [f"{key}: {count:,} of {counted(a.numel(), 'value')}, by up to {largest:.3g}"]


def compare_numbers(original: Original, point: Point, target: Path | None, outcome: Outcome) -> None:
    """Merge in memory and compare the evaluators' numbers, for a result whose model was not kept.

    It is written to `target` in the same pass, unless that is None.
    """
    merged: dict[str, torch.Tensor] = {}
    jobs = [point.job(merged), *([] if target is None else [point.job(target.absolute())])]
    with plan(jobs, point.options) as planned:
        report = run_plan(planned)
        scoring = point.read_scoring(planned)
    now = dict(scoring.measure(merged, point.context))
    for model, by_key in report.moments[0].items():
        now |= summarise(by_key)[""].metrics(point.names[model])
    shared = [name for name in original.metrics if name in now]
    outcome.compared = f"{counted(len(shared), 'number')}, since no file was kept: {some(shared, 5)}"
    for name in shared:
        then = original.metrics[name]
        if now[name] != then and not (math.isnan(now[name]) and math.isnan(then)):
            outcome.differences.append(f"{name}: {then!r} was, {now[name]!r} is")
    if not shared:
        outcome.differences.append("nothing that was measured can be measured again, and no file was kept")

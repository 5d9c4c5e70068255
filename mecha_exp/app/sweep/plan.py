"""The plan of a sweep: its points, which results are stored, and the passes that merge the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig

from mecha_exp.app.batch import Batch, plan_batches
from mecha_exp.app.config.grid import Grid
from mecha_exp.app.config.jobs import enter
from mecha_exp.app.point import Point
from mecha_exp.app.preparation import prepare_job
from mecha_exp.app.workbench import Workbench
from mecha_exp.errors import MechaError
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal.console import make_table, print_line, show_error, stdout


@dataclass
class SweepPlan:
    """The plan of a sweep.

    Attributes:
        points: the number of its points.
        known: the number of points whose results are stored.
        repeated: the number of points with the same merge as another one.
        batches: the passes that merge the others.
        failing: the errors of points that cannot be merged, by their numbers.
    """

    points: int
    known: int = 0
    repeated: int = 0
    batches: list[Batch] = field(default_factory=list)
    failing: dict[int, str] = field(default_factory=dict)


def plan_sweep(grid: Grid, bench: Workbench) -> SweepPlan:
    """Plan every point of a grid, and look up which results are stored.

    Reads the headers of the models, and their content if its hash is not cached and the store has results.
    """
    plan = SweepPlan(len(grid))
    missing: dict[str, tuple[int, Point]] = {}
    for number, config in enumerate(grid.in_turn()):
        try:
            enter(config)
            point = _sign(config, Path("outputs/multiruns/<time>", str(number)), bench)
            if point.digest in missing:
                plan.repeated += 1
            elif bench.recall(point) is not None:
                plan.known += 1
            else:
                missing[point.digest] = number, point
        except MechaError as error:
            plan.failing[number] = str(error)
    plan.batches, errors = plan_batches([point for _, point in missing.values()])
    plan.failing |= {missing[point.digest][0]: str(error) for point, error in errors.items()}
    return plan


def _sign(config: DictConfig, folder: Path, bench: Workbench) -> Point:
    point = prepare_job(config, folder)
    return bench.sign(
        replace(point, hashes_inputs=not bench.is_empty)
    )  # nothing to look up in an empty store


def show_sweep_plan(plan: SweepPlan, swept: Sequence[str]) -> None:
    """Print a plan: one row per pass."""
    passes = make_table("pass", "points", "reads", "writes", "kept in memory")
    for number, batch in enumerate(plan.batches, 1):
        sizes = (human_bytes(size) for size in (batch.read, batch.written, batch.held))
        passes.add_row(str(number), str(len(batch.points)), *sizes)
    if plan.batches:
        stdout.print(passes)
    print_line(f" points   {plan.points}; swept: {', '.join(swept)}")
    stdout.print(f" known    {plan.known}: nothing is computed for them")
    if plan.repeated:
        stdout.print(f" repeated {plan.repeated}: the same merge as another point")
    points = sum(len(batch.points) for batch in plan.batches)
    read, written = (human_bytes(sum(getattr(b, what) for b in plan.batches)) for what in ("read", "written"))
    stdout.print(f" to make  {points} in {len(plan.batches)} passes: {read} read, {written} written")
    for number, error in sorted(plan.failing.items()):
        show_error(f"point {number}: {error}")
    stdout.print(" Nothing was merged. Leave out debug=plan to do it.", markup=False)

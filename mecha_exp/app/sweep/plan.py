"""What a sweep would do: its points, those that are known already, and the passes that make the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from mecha_exp.app.batch import Wanted, Wave, survey
from mecha_exp.app.point import prepare, resolve
from mecha_exp.app.workbench import Entry, Workbench
from mecha_exp.errors import MechaError
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal import make_table, show_error, stdout


@dataclass
class SweepPlan:
    """What a sweep comes to.

    Attributes:
        points: how many there are.
        known: those whose results are there already.
        repeated: those that come to the same as another one.
        waves: the passes that make the rest.
        failing: what is wrong with points that cannot be made, by their numbers.
    """

    points: int
    known: int = 0
    repeated: int = 0
    waves: list[Wave] = field(default_factory=list)
    failing: dict[int, str] = field(default_factory=dict)


def plan_sweep(configs: Sequence[DictConfig], bench: Workbench) -> SweepPlan:
    """Plan every point, and look up what is known.

    Reads the headers of the models; their content too where it is not remembered and a store has results.
    """
    found = SweepPlan(len(configs))
    missing: dict[str, int] = {}
    wanted: list[Wanted] = []
    for number, config in enumerate(configs):
        try:
            folder = Path("outputs/multiruns/<time>", str(number))
            entry = _entry(config, folder, bench)
            if entry.digest in missing:
                found.repeated += 1
            elif bench.recall(entry) is not None:
                found.known += 1
            else:
                missing[entry.digest] = number
                wanted.append(Wanted(entry.point, bool(entry.scoring.evaluations)))
        except MechaError as error:
            found.failing[number] = str(error)
    numbers = list(missing.values())
    found.waves, failing = survey(wanted)
    found.failing |= {numbers[place]: str(error) for place, error in failing.items()}
    return found


def _entry(config: DictConfig, folder: Path, bench: Workbench) -> Entry:
    point = prepare(resolve(config), folder)
    # where nothing is known there is nothing to look up, and names tell the points apart as well
    contents = {path: str(path) for path in point.files.values()} if bench.is_empty else None
    return bench.enter(point, folder, contents)


def show_sweep_plan(plan: SweepPlan, swept: Sequence[str]) -> None:
    """Print a plan: a row for each pass."""
    passes = make_table("pass", "points", "reads", "writes", "kept in memory")
    for number, wave in enumerate(plan.waves, 1):
        sizes = (human_bytes(size) for size in (wave.read, wave.written, wave.held))
        passes.add_row(str(number), str(len(wave.numbers)), *sizes)
    if plan.waves:
        stdout.print(passes)
    stdout.print(f" points   {plan.points}; swept: {', '.join(swept)}", markup=False, soft_wrap=True)
    stdout.print(f" known    {plan.known}: nothing is computed for them")
    if plan.repeated:
        stdout.print(f" repeated {plan.repeated}: the same merge as another point")
    made = sum(len(wave.numbers) for wave in plan.waves)
    stdout.print(
        f" to make  {made} in {len(plan.waves)} passes: {human_bytes(sum(w.read for w in plan.waves))} read, "
        f"{human_bytes(sum(w.written for w in plan.waves))} written"
    )
    for number, error in sorted(plan.failing.items()):
        show_error(f"point {number}: {error}")
    stdout.print(" Nothing was merged. Leave out debug=plan to do it.", markup=False)

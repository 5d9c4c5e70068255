"""The same command after an interrupt goes on in the middle of a point's examples, and progress is shown."""

import json
import re
from pathlib import Path

import pytest

from mecha_exp.terminal import bars

PLUGIN = '''
import os
from pathlib import Path
from mecha_exp import Outcomes, evaluator

@evaluator("in_parts", metric="mean")
def in_parts(state_dict, *, context, ends: bool = False):
    """Measure 40 examples, 4 at a time; the sixth part of each point ends the first start."""
    total = float(sum(tensor.double().sum() for tensor in state_dict.values()))

    def measure(part):
        log = Path("log.txt")
        with log.open("a") as file:
            file.write(f"{context.name} {part.start}\\n")
        mark = Path(f"mark-{context.name}")
        if part.start == 20 and not mark.exists():
            mark.touch()
            if ends:
                os._exit(3)
            raise KeyboardInterrupt
        return [total * number for number in part]

    parts = [range(start, start + 4) for start in range(0, 40, 4)]
    return Outcomes({"t": [value for part in context.in_parts("rows", parts, measure) for value in part]})
'''
POINTS = ("alpha=0.3,0.5", "output=none", "plugins=[parts.py]", "evaluator.name=in_parts", "-m")


@pytest.fixture(autouse=True)
def plugin(folder: Path) -> None:
    (folder / "parts.py").write_text(PLUGIN)


def starts_of(folder: Path) -> dict[str, list[int]]:
    """Where the measured parts of each point and input start."""
    starts: dict[str, list[int]] = {}
    for line in (folder / "log.txt").read_text().splitlines():
        name, _, start = line.rpartition(" ")
        starts.setdefault(name, []).append(int(start))
    return starts


def test_the_same_command_goes_on_at_the_example_where_it_stopped(app, folder):
    statuses = [app(*POINTS).status]
    while statuses[-1] == 130:
        statuses.append(app(*POINTS).status)

    assert statuses[-1] == 0 and len(statuses) > 2
    once_more = [*range(0, 21, 4), *range(20, 40, 4)]  # the part that was interrupted
    assert all(starts == once_more for starts in starts_of(folder).values())
    assert not list((folder / "outputs" / "store").rglob("*.partial*"))
    records = [json.loads(path.read_text()) for path in folder.glob("outputs/multiruns/*/*/run.json")]

    (folder / "log.txt").unlink()
    assert app(*POINTS, "rerun=evaluate", "hydra.sweep.dir=again").status == 0

    assert all(starts == [*range(0, 40, 4)] for starts in starts_of(folder).values())
    again = [json.loads(path.read_text()) for path in folder.glob("again/*/run.json")]
    assert sorted(r["metrics"]["mean"] for r in again) == sorted(r["metrics"]["mean"] for r in records)


@pytest.mark.heavy
def test_a_worker_that_ends_is_replaced_by_one_that_goes_on(app, folder):
    assert app(*POINTS, "evaluator.ends=true", "evaluator.workers=2").status == 0

    of_points = {name: starts for name, starts in starts_of(folder).items() if name in "01"}
    assert of_points and all(s == [*range(0, 21, 4), *range(20, 40, 4)] for s in of_points.values())


def test_examples_are_counted_while_they_are_measured(app, folder, monkeypatch):
    monkeypatch.setattr(bars, "QUICKLY_MEASURED", 0.0)
    monkeypatch.setattr(bars, "LOG_SECONDS", 0.0)
    for name in ("0", "base", "expert_0_3", "expert_4_6", "expert_7_9"):
        (folder / f"mark-{name}").touch()

    assert app(*POINTS[1:], "alpha=0.5").status == 0

    [log] = folder.glob("outputs/multiruns/*/0/mecha_exp.log")
    shown = log.read_text()
    assert re.search(r"0: 24 of 40 rows, \d+ s left", shown)
    assert re.search(r"base: 36 of 40 rows, 0 s left", shown)

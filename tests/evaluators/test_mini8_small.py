"""The structure of the eight-task bench, on its small experiment: never a ranking of methods."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from programs import environment

from mecha_exp.examples.mini8.tasks import tasks
from mecha_exp.runs.outcomes import OUTCOMES_FILE, read_outcomes
from mecha_exp.verdict import Candidate, conclude


@pytest.mark.heavy
def test_the_small_bench_has_the_structure_of_the_published_one(tmp_path: Path):
    command = [sys.executable, "-m", "mecha_exp", "experiment=mini8_small", "tracking=none"]
    subprocess.run(command, cwd=tmp_path, check=True, env=environment())

    (sweep,) = (tmp_path / "outputs" / "multiruns").iterdir()
    made = [json.loads(path.read_text()) for path in sweep.glob("*/run.json")]
    inputs = made[0]["references"]
    names = [*tasks()["validation"]]
    share = [inputs["base"][f"accuracy/{t}"] / inputs[t][f"accuracy/{t}"] for t in names]
    assert 0.45 < sum(share) / len(share) < 0.75
    for task in names:
        others = [inputs[name][f"accuracy/{task}"] for name in inputs if name != task]
        assert inputs[task][f"accuracy/{task}"] > max(others), task
    sums = {r["parameters"]["alpha"]: r for r in made if r["parameters"]["recipe"] == "task_arithmetic"}
    best = max(sums, key=lambda alpha: sums[alpha]["metrics"]["accuracy"])
    assert min(sums) < best < max(sums)

    folder = next(p.parent for p in sweep.glob("*/run.json") if json.loads(p.read_text())["reported"])
    parts = [part for part in read_outcomes(folder / OUTCOMES_FILE) if part.role == "point"]
    twice = Candidate("once", "a", outcomes={part.split: part.outcomes for part in parts})
    verdict = conclude([twice, replace(twice, name="again", recipe="b")], metric="accuracy")
    assert verdict.comparisons and not any(c.distinguishable for c in verdict.comparisons)

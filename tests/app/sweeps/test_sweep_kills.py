"""A sweep that is killed at random moments and started again ends as if nothing had happened."""

import csv
import json
import os
from pathlib import Path

import pytest
from programs import printed
from sweep_folders import mlflow_statuses

POINTS = 30
KILLS = 10
CALLS = 8
COMMAND = (
    "recipe=weighted_sum",
    "alpha=" + ",".join(f"{i / POINTS:.3g}" for i in range(POINTS)),
    "output=none",
    "evaluator=none",
    "-m",
)


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_sweep_that_is_killed_again_and_again_gives_the_undisturbed_table(tmp_path: Path):
    printed("sweep_killing", tmp_path, 0, KILLS, *COMMAND)

    disturbed = table(tmp_path / "disturbed")
    assert disturbed == table(tmp_path / "undisturbed")
    assert [row["point"] for row in disturbed] == [str(number) for number in range(POINTS)]
    statuses = mlflow_statuses(tmp_path / "disturbed")
    assert statuses == ["FINISHED"] * (POINTS + 1)


@pytest.mark.parametrize("fault", ["kill", "full"])
@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_sweep_that_ends_at_any_call_goes_on_to_the_undisturbed_table(tmp_path: Path, fault: str):
    words = (fault, CALLS, "alpha=0.2,0.5", *COMMAND[2:])

    chosen = json.loads(printed("sweep_crash_points", tmp_path, *words, timeout=580))

    assert len(chosen) > CALLS // 2
    undisturbed = table(tmp_path / "undisturbed")
    for at in map(str, chosen):
        assert table(tmp_path / at) == undisturbed, at
        assert mlflow_statuses(tmp_path / at) == ["FINISHED"] * 3, at
        said = (tmp_path / at / "output.txt").read_text()
        assert "Traceback" not in said, at
        first, second = (tmp_path / at / "status.txt").read_text().split()
        assert ("the disk is full" in said) == (first == "1"), at  # the last calls ask for no room
        assert (first == "77") == (fault == "kill") and second == "0", at


def table(folder: Path) -> list[dict[str, str]]:
    """The points and what was measured, without how long it took."""
    (path,) = folder.glob("outputs/multiruns/*/sweep.csv")
    told = ("point", "name", "status", "alpha", "weights/")
    with path.open() as file:
        return [{k: v for k, v in row.items() if k.startswith(told)} for row in csv.DictReader(file)]

"""Evaluators that fail in a sweep: each takes its own point with it and no other."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sweep_folders import mlflow_statuses

EVALUATOR = """
import os, time
from mecha_exp import evaluator

@evaluator("faulty", metric="x")
def faulty(state_dict, *, mended: bool = False):
    x = round(float(state_dict["w"].mean()), 3)
    if not mended and x == 0.1:
        raise ZeroDivisionError("there is nothing to divide")
    if not mended and x == 0.2:
        time.sleep(600)
    if not mended and x == 0.3:
        return {"x": float("nan")}
    if not mended and x == 0.4:
        os._exit(3)
    return {"x": x}
"""
ALPHAS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
SWEEP = (
    "recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]",
    f"alpha={','.join(map(str, ALPHAS))}", "output=none", "-m", "hydra.sweep.dir=sweep",
    "plugins=[faulty.py]", "evaluator.name=faulty", "evaluator.timeout=2",
)  # fmt: skip


@pytest.fixture
def inputs(folder: Path) -> Path:
    """A model of zeros and one of ones, so that a merge of them is full of its alpha, and the evaluator."""
    save_file({"w": torch.zeros(64)}, folder / "a.safetensors")
    save_file({"w": torch.ones(64)}, folder / "b.safetensors")
    (folder / "faulty.py").write_text(EVALUATOR)
    return folder


def errors(folder: Path) -> dict[float, str | None]:
    records = [json.loads((folder / "sweep" / str(n) / "run.json").read_text()) for n in range(len(ALPHAS))]
    return {alpha: record["error"] for alpha, record in zip(ALPHAS, records, strict=True)}


@pytest.mark.heavy
def test_evaluators_that_raise_hang_crash_or_return_nan_cost_their_own_points(app, inputs, passes_run):
    outcome = app(*SWEEP, tracked=True)

    assert outcome.status == 1
    failed = errors(inputs)
    assert failed[0.05] is failed[0.3] is failed[0.5] is None
    assert "the evaluator 'faulty' failed: ZeroDivisionError: there is nothing to divide" in str(failed[0.1])
    assert "the evaluator 'faulty' was not done after 2 s and was ended" in str(failed[0.2])
    assert "the evaluator 'faulty' ended its process (status 3)" in str(failed[0.4])
    assert "3 of 6 points failed" in outcome.out
    with (inputs / "sweep" / "sweep.csv").open() as file:
        rows = {row["alpha"]: row for row in csv.DictReader(file) if row["alpha"]}
    assert [row["status"] == "FAILED" for row in rows.values()] == [False, True, True, False, True, False]
    assert math.isnan(float(rows["0.3"]["x"]))
    assert "alpha=0.3: x is nan" in outcome.err
    assert "0.5000 *" in outcome.out
    assert sorted(mlflow_statuses(inputs)) == ["FAILED"] * 4 + ["FINISHED"] * 3  # the sweep's too

    again = app(*SWEEP, "evaluator.mended=true", tracked=True)

    assert again.status == 0, again.err
    assert set(errors(inputs).values()) == {None}
    assert set(mlflow_statuses(inputs)) == {"FINISHED"}
    assert passes_run == [6, 6]

"""Tracing runs each pass as often as it has stages, however many reductions it feeds."""

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import EngineOptions, Job
from mecha_exp.engine import plan
from mecha_exp.engine.compiler import tracer
from mecha_exp.methods.linear import weighted_sum


@pytest.mark.parametrize("points", [1, 5])
def test_a_pass_is_traced_once_for_all_of_its_reductions(tmp_path, monkeypatch, points):
    for name in "ab":
        save_file({"w": torch.rand(8, 8)}, tmp_path / f"{name}.safetensors")
    a, b = (str(tmp_path / f"{name}.safetensors") for name in "ab")
    runs: list[int] = []
    tiles = tracer._ToyRun._tiles
    monkeypatch.setattr(tracer._ToyRun, "_tiles", lambda *given: runs.append(1) or tiles(*given))
    jobs = [Job(weighted_sum(a, b, alpha=0.1 + i / 10), None, statistics=True) for i in range(points)]

    with plan(jobs, EngineOptions(fuse="always")):
        pass

    assert len(runs) == 2  # once to record, once for the values of the reductions

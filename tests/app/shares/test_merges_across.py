"""One merge by many tasks, from the command line."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import merge
from mecha_exp.graph.nodes import call
from mecha_exp.recipe.text import serialize


@pytest.fixture
def pair(folder):
    """The folders of two models in the current folder, and the recipe of their mean."""
    for seed, name in enumerate("ab"):
        Path(name).mkdir()
        torch.manual_seed(seed)
        save_file({f"layers.{i}.weight": torch.randn(48, 48) for i in range(6)}, f"{name}/model.safetensors")
        Path(name, "config.json").write_text(json.dumps({"model_type": "tiny"}))
    Path("mean.mecha").write_text(serialize(call("n_average", "a", "b")))


def hashes(path: str) -> dict[str, str]:
    """The SHA-256 of each file of a folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(path).iterdir()}


def test_tasks_by_hand_and_the_command_that_puts_the_model_in_its_place(pair, app):
    merge(call("n_average", "a", "b"), "one", shard_size=20_000)
    words, more = ["merge", "mean.mecha", "engine.across=2"], ["--shard-size=20KB", "-o", "many"]

    first, second = (app(*words, f"engine.task={task}", *more) for task in (1, 2))
    assert "task 1 of 2 is done. When all are, the same command without engine.task puts" in first.out
    assert second.status == 0 and not Path("many").exists()
    last = app(*words, *more)

    assert (last.status, last.out.splitlines()[0]) == (0, "many")
    assert hashes("many") == hashes("one")


def test_settings_may_stand_between_flags(pair, app):
    outcome = app(
        "merge", "mean.mecha", "--shard-size=20KB", "engine.across=2", "engine.task=1", "-o", "many"
    )

    assert outcome.status == 0, outcome.err
    assert "task 1 of 2 is done" in outcome.out


@pytest.mark.heavy
def test_a_run_is_made_by_many_and_measured_as_one(pair, app):
    words = ["recipe=linear", "models.experts=[a,b]", "output.shard_size=20KB", "evaluator=none"]
    assert app(*words, "hydra.run.dir=one").status == 0

    assert app(*words, "hydra.run.dir=many", "engine.across=2", "store=null").status == 0

    assert hashes("many/model") == hashes("one/model")


def test_a_run_is_not_a_single_task(pair, app):
    outcome = app("recipe=linear", "models.experts=[a,b]", "engine.across=2", "engine.task=1")

    assert outcome.status != 0
    assert "engine.task: a run measures and records a whole model. Single tasks are" in outcome.err

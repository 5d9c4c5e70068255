"""Where runs are logged, and by which names their inputs are known there and in tables."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp.runs.sweep import Tracking

COMMITS = {"org/tiny": "0" * 40, "org/Llama-3.1-8B": "0123456789abcdef" + "0" * 24}
LOCAL = "sqlite:///outputs/mlflow.db"


def snapshot(name: str, commit: str) -> Path:
    """A model in a cache of the hub's layout, its weights being a link as they are there."""
    repository = Path("hub", f"models--{name.replace('/', '--')}")
    folder, blobs = repository / "snapshots" / commit, repository / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    save_file({"w": torch.full((2, 2), float(len(name + commit)))}, blobs / commit)
    (folder / "model.safetensors").symlink_to(Path("..", "..", "blobs", commit))
    (folder / "config.json").write_text("{}")
    return folder


def test_models_of_the_hub_are_called_by_their_names_and_mlflows_variables_count(app, folder, monkeypatch):
    from mlflow.tracking import MlflowClient

    paths = [str(snapshot(name, commit)) for name, commit in COMMITS.items()]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")

    words = ["recipe=linear", f"models.experts=[{','.join(paths)}]", "evaluator=none", "output=none"]
    outcome = app(*words, "hydra.run.dir=run", tracked=True)

    assert outcome.status == 0, outcome.err
    record = json.loads((folder / "run" / "run.json").read_text())
    assert {name for name in record["parameters"] if name.startswith("input/")} == {
        f"input/{n}" for n in COMMITS
    }
    assert {name.partition("/cosine/")[2] for name in record["metrics"] if "cosine" in name} == {*COMMITS}
    assert "tiny" in outcome.out and "0" * 40 not in outcome.out
    client = MlflowClient("sqlite:///mine.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert {f"weights/cosine/{name}" for name in COMMITS} <= run.data.metrics.keys()
    assert {f"input/{name}" for name in COMMITS} <= run.data.params.keys()
    assert not (folder / "outputs" / "mlflow.db").exists()


def test_two_states_of_a_model_of_the_hub_are_told_apart(app, folder):
    paths = [snapshot("org/tiny", commit) for commit in ("a" * 40, "b" * 40)]
    file = snapshot("org/other", "c" * 40) / "model.safetensors"

    app(
        "recipe=linear",
        f"models.experts=[{','.join(map(str, [*paths, file]))}]",
        *("evaluator=none", "output=none", "hydra.run.dir=run"),
    )

    record = json.loads((folder / "run" / "run.json").read_text())
    names = {name.removeprefix("input/") for name in record["parameters"] if name.startswith("input/")}
    assert names == {"org/tiny_aaaaaaaa", "org/tiny_bbbbbbbb", "model"}


@pytest.mark.parametrize(
    ("config", "variable", "expected"),
    [
        ("", None, LOCAL),
        ("", "", LOCAL),
        ("", "http://host:5000", "http://host:5000"),
        ("sqlite:///x.db", "http://host:5000", "sqlite:///x.db"),
        (None, "http://host:5000", None),
    ],
)
def test_a_variable_counts_where_the_configuration_says_nothing(monkeypatch, config, variable, expected):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
        if variable is not None:
            monkeypatch.setenv(name, variable)

    assert Tracking.of(SimpleNamespace(uri=config, experiment="")).uri == expected
    assert Tracking.of(SimpleNamespace(uri=config, experiment="")).experiment == (variable or "mecha_exp")
    assert Tracking.of(SimpleNamespace(uri=config, experiment="mine")).experiment == "mine"

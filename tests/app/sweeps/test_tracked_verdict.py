"""What the MLflow runs of a sweep say: the reported number, the sentence, models, inputs, and steps."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from sweep_folders import sweep_of


@pytest.fixture
def client(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{(folder / 'outputs' / 'mlflow.db').as_posix()}")


def runs_of(client: MlflowClient) -> tuple:
    """The run of the one sweep, those of its points, and those of its inputs, by their names."""
    experiment = client.get_experiment_by_name("mecha_exp").experiment_id
    runs = client.search_runs([experiment], max_results=1000)
    (parent,) = [run for run in runs if "swept" in run.data.tags]
    children = [run for run in runs if run is not parent]
    inputs = {run.info.run_name: run for run in children if run.data.tags.get("role") == "input"}
    points = {run.info.run_name: run for run in children if run.data.tags.get("role") != "input"}
    return parent, points, inputs


def test_the_run_of_a_sweep_has_the_reported_number_its_interval_and_the_sentence(app, folder, client):
    assert app("alpha=0.3,0.9", "-m", tracked=True).status == 0

    parent, points, inputs = runs_of(client)

    verdict = json.loads((sweep_of(folder) / "verdict.json").read_text())
    numbers = parent.data.metrics
    low, high = verdict["selected"]["ci95"]
    assert numbers["test/accuracy"] == verdict["selected"]["estimate"] != numbers["best/accuracy"]
    assert (numbers["test/accuracy/ci95_low"], numbers["test/accuracy/ci95_high"]) == (low, high)
    assert 0 <= numbers["p_holm/base"] <= 1
    assert parent.data.tags["verdict"] == verdict["sentence"]
    assert parent.data.tags["mlflow.note.content"].startswith(verdict["sentence"])
    for run in points.values():
        path = Path(run.data.tags["model/path"])
        assert sha256(path.read_bytes()).hexdigest() == run.data.tags["model/sha256"]
    assert set(inputs) == {"base", "expert_0_3", "expert_4_6", "expert_7_9"}
    for run in inputs.values():
        path = Path(run.data.tags["model/path"])
        assert sha256(path.read_bytes()).hexdigest() == run.data.tags["model/sha256"]


def test_a_search_has_its_trials_and_the_best_so_far_by_step(app, folder, client):
    words = ("sweep=search", "alpha=interval(0,1.5)", "sweep.trials=5", "output=none", "-m")
    assert app("recipe=task_arithmetic", *words, tracked=True).status == 0

    parent, points, _ = runs_of(client)

    def history(name: str) -> list[float]:
        entries = client.get_metric_history(parent.info.run_id, name)
        return [entry.value for entry in sorted(entries, key=lambda entry: entry.step)]

    trials, best = history("trial/accuracy"), history("best_so_far/accuracy")
    assert len(trials) == 5 and sorted(trials) == sorted(r.data.metrics["accuracy"] for r in points.values())
    assert best == [max(trials[: n + 1]) for n in range(5)]


def test_a_descent_has_its_losses_by_step(app, folder, client):
    words = ("sweep=gradient", "sweep.steps=4", "sweep.checkpoints=1", "output=none", "-m")
    outcome = app("recipe=task_arithmetic", *words, tracked=True)
    assert outcome.status == 0, outcome.err

    parent, _, _ = runs_of(client)

    (name,) = [name for name in parent.data.metrics if name.startswith("loss/")]
    assert [entry.step for entry in client.get_metric_history(parent.info.run_id, name)] == [0, 1, 2, 3]

"""The command of the README, as a newcomer types it, and what it leaves behind."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pandas
import pytest
import torch
from safetensors.torch import load_file

from mecha_exp.tracking.mlflow_client import last_comparison

COMMAND = ("recipe=ties", "alpha=0.3,0.5,0.7", "-m")
NAMES = ["alpha=0.3", "alpha=0.5", "alpha=0.7"]


@pytest.fixture(scope="module")
def demo(as_a_user, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, as_a_user(*COMMAND, cwd=folder)


@pytest.fixture(scope="module")
def client(demo):
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{(demo[0] / 'outputs/mlflow.db').as_posix()}")


@pytest.fixture(scope="module")
def runs(client):
    experiment = client.get_experiment_by_name("mecha_exp")
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


def sweep_folder(demo) -> Path:
    return next((demo[0] / "outputs/multiruns").iterdir())


def test_it_succeeds_and_shows_a_table_with_the_best_point_and_the_inputs(demo):
    outcome = demo[1]

    assert outcome.status == 0, outcome.err
    for word in (
        "alpha",
        "accuracy",
        "0.3",
        "0.5",
        "0.7",
        "*",
        "base",
        "expert_0_3",
        "python -m mecha_exp ui",
    ):
        assert word in outcome.out
    assert outcome.err == ""


def test_it_says_what_each_point_came_to_as_it_is_done(demo):
    for number, name in enumerate(NAMES, 1):
        assert f"[{number}/3] {name}: accuracy 0.8" in demo[1].out


def test_it_writes_into_outputs_only(demo, files_in):
    assert {name.split("/")[0] for name in files_in(demo[0])} == {"outputs"}


@pytest.mark.parametrize("point", ["0", "1", "2"])
def test_every_point_has_a_folder_with_its_model_and_its_record(demo, files_in, point):
    names = files_in(sweep_folder(demo) / point)

    for name in ("model.safetensors", "metrics.json", "recipe.yaml", "recipe.mecha", "mecha_exp.log"):
        assert name in names
    assert ".hydra/config.yaml" in names


def test_merging_beats_every_model_that_was_merged(demo):
    record = json.loads((sweep_folder(demo) / "2/run.json").read_text())

    best_input = max(measured["accuracy"] for measured in record["references"].values())
    assert record["metrics"]["accuracy"] > best_input + 0.03


def test_the_models_differ_and_have_the_keys_of_the_base(demo):
    models = [load_file(sweep_folder(demo) / point / "model.safetensors") for point in "012"]

    assert len(models[0]) == 8
    assert all(model.keys() == models[0].keys() for model in models)
    assert not torch.equal(models[0]["fc1.weight"], models[1]["fc1.weight"])


def test_the_table_is_a_csv_file_too(demo):
    with (sweep_folder(demo) / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))

    points = [row for row in rows if row["status"] == "FINISHED"]
    assert [row["alpha"] for row in points] == ["0.3", "0.5", "0.7"]
    assert next(row["name"] for row in rows if row["status"] == "REFERENCE") == "base"


def test_the_figure_is_a_picture(demo):
    assert (sweep_folder(demo) / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_mlflow_has_one_parent_and_a_child_for_each_point_and_each_input(runs):
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    inputs = [run for run in children if run.data.tags.get("role") == "input"]

    assert sorted(run.info.run_name for run in children if run not in inputs) == NAMES
    assert sorted(run.info.run_name for run in inputs) == ["base", "expert_0_3", "expert_4_6", "expert_7_9"]
    assert all("accuracy" in run.data.metrics for run in inputs)
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parents[0].info.run_id}
    assert all(run.info.status == "FINISHED" for run in runs)
    assert parents[0].data.tags["best"] == "alpha=0.7"
    assert parents[0].data.tags["recipe"] == "ties"
    assert parents[0].data.tags["swept"] == "alpha"


def test_the_dashboard_compares_the_points_and_inputs_of_the_last_sweep(demo, runs):
    comparison = last_comparison(f"sqlite:///{(demo[0] / 'outputs/mlflow.db').as_posix()}")

    children = {run.info.run_id for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert comparison.startswith("/#/compare-runs?")
    assert {run for run in children if run in comparison} == children


def test_the_dashboard_compares_them_by_the_main_metric(client, runs):
    experiment = client.get_experiment_by_name("mecha_exp")

    assert experiment.tags["mlflow.experiment.primaryMetric.name"] == "accuracy"
    assert experiment.tags["mlflow.experiment.primaryMetric.greaterIsBetter"] == "True"
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert {next(iter(run.data.metrics)) for run in children} == {"accuracy"}


def test_an_input_says_what_ran_it_and_by_what_it_was_measured(runs):
    inputs = [run for run in runs if run.data.tags.get("role") == "input"]

    for run in inputs:
        assert run.data.tags["mlflow.source.name"] == "python -m mecha_exp"
        splits = {used.dataset.name: set() for used in run.inputs.dataset_inputs}
        for used in run.inputs.dataset_inputs:
            splits[used.dataset.name] |= {tag.value for tag in used.tags}
        assert splits == {"digits": {"validation", "test"}}


def test_a_point_says_by_what_it_was_measured_and_the_chosen_one_on_both_splits(runs):
    of_input, *_ = (run for run in runs if run.data.tags.get("role") == "input")
    splits = {used.dataset.digest: used.tags[0].value for used in of_input.inputs.dataset_inputs}

    measured_on = {
        run.info.run_name: sorted(splits[used.dataset.digest] for used in run.inputs.dataset_inputs)
        for run in runs
        if run.data.tags.get("role") != "input" and "mlflow.parentRunId" in run.data.tags
    }

    assert measured_on.pop("alpha=0.7") == ["test", "validation"]
    assert list(measured_on.values()) == [["validation"]] * 2


def test_ui_prints_the_address_of_the_training_view(demo, runs, free_port):
    command = [sys.executable, "-m", "mecha_exp", "ui", "--port", str(free_port)]
    with subprocess.Popen(command, cwd=demo[0], stdout=subprocess.PIPE, text=True) as server:
        try:
            said = next(line for line in server.stdout if line.startswith("the last sweep"))
        finally:
            server.terminate()

    address = said.removeprefix("the last sweep: ").strip()
    query = parse_qs(urlsplit(urlsplit(address).fragment).query)
    assert address.startswith(f"http://127.0.0.1:{free_port}/#/compare-runs?")
    assert query["workflowType"] == ["machine_learning"]
    children = {run.info.run_id for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert set(json.loads(query["runs"][0])) == children


def test_runs_are_found_by_their_hyperparameters_and_say_by_what_they_were_measured(client, runs):
    (experiment,) = {run.info.experiment_id for run in runs}

    (half,) = client.search_runs([experiment], "metrics.`hp/alpha` > 0.4 and metrics.`hp/alpha` < 0.6")

    assert half.info.run_name == "alpha=0.5"
    assert half.data.tags["mlflow.source.name"] == "python -m mecha_exp"
    (dataset,) = half.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.tags[0].value) == ("digits", "validation")


def test_the_chosen_point_alone_is_measured_on_the_test_images(runs):
    accuracies = {
        run.info.run_name: run.data.metrics["test/accuracy"]
        for run in runs
        if "test/accuracy" in run.data.metrics
    }

    assert [name for name in accuracies if name in NAMES] == ["alpha=0.7"]
    assert accuracies["alpha=0.7"] == pytest.approx(0.8832, abs=1e-4)


def test_the_table_says_on_what_points_were_chosen(demo):
    said = (
        "accuracy: sorted and chosen on validation; test/accuracy is that of the chosen points and the inputs"
    )
    assert said in demo[1].out


def test_the_outcomes_are_a_table_of_every_image(demo):
    table = pandas.read_parquet(sweep_folder(demo) / "outcomes.parquet")
    record = json.loads((sweep_folder(demo) / "2/run.json").read_text())

    images = table.groupby(["split", "name"]).size()
    assert (images["validation"] == 362).all()
    assert (images["test"] == 357).all()
    inputs = {"base", "expert_0_3", "expert_4_6", "expert_7_9"}
    assert set(images["validation"].index) == {*NAMES, *inputs}
    assert set(images["test"].index) == {"alpha=0.7", *inputs}
    tasks = table.groupby(["split", "name", "task"], observed=True).value.mean()
    for split, prefix in (("validation", ""), ("test", "test/")):
        for task, mean in tasks[split, "alpha=0.7"].items():
            assert record["metrics"][f"{prefix}accuracy/{task}"] == pytest.approx(mean)
        for task, mean in tasks[split, "base"].items():
            assert record["references"]["base"][f"{prefix}accuracy/{task}"] == pytest.approx(mean)


def test_a_child_has_its_hyperparameters_inputs_metrics_and_tags(runs):
    child = next(run for run in runs if run.info.run_name == "alpha=0.5")

    assert child.data.params["alpha"] == "0.5"
    assert child.data.params["k"] == "0.2"
    assert child.data.params["method"] == "ties"
    assert child.data.params["input/base"].endswith("base.safetensors")
    for metric in (
        "accuracy",
        "accuracy/0_3",
        "accuracy/normalised",
        "weights/distance/base",
        "weights/cosine/expert_0_3",
        "weights/relative_change/base",
        "time/merge_seconds",
        "io/bytes_per_second",
        "memory/peak_bytes",
        "nonfinite_values",
    ):
        assert metric in child.data.metrics
    assert len(child.data.tags["signature"]) == 64
    assert len(child.data.tags["fingerprint/base"]) == 64
    assert child.data.tags["version/torch"] == torch.__version__
    assert len(child.data.tags["git/commit"]) == 40
    assert child.data.tags["git/dirty"] in ("true", "false")


def test_the_artifacts_are_the_configuration_the_recipe_the_tables_and_the_figure(client, runs):
    by_name = {run.info.run_name: run.info.run_id for run in runs}

    child = {a.path for a in client.list_artifacts(by_name["alpha=0.3"])}
    parent = {a.path for a in client.list_artifacts(by_name["ties by alpha"])}
    assert {"recipe.yaml", "recipe.mecha", "weight_stats.csv", "metrics.json", "config"} <= child
    assert "outcomes.parquet" in child
    assert {"sweep.csv", "sweep.png", "outcomes.parquet"} <= parent


def test_the_points_differ_in_their_signatures(runs):
    points = [run for run in runs if "signature" in run.data.tags]

    assert len({run.data.tags["signature"] for run in points}) == len(points) == 3

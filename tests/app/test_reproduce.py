"""A result is made again from its folder, from MLflow, or from the model; what stands against it is said."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mecha_exp.app.provenance import git_changes
from mecha_exp.app.reproduction.comparison import describe_differences
from mecha_exp.system.machine import machine

MERGE = ("recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]", "alpha=0.25")
NAMES = ("a", "b")


def only_run(folder: Path) -> Path:
    (run,) = (folder / "outputs" / "runs").iterdir()
    return run


@pytest.fixture
def inputs(folder: Path) -> Path:
    """Two models in the current folder."""
    for number, name in enumerate(NAMES):
        torch.manual_seed(number)
        tensors = {f"layer.{i}.weight": torch.randn(8, 5, dtype=torch.float64).half() for i in range(3)}
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def outcome(monkeypatch, capsys):
    """Reproduces, and returns the exit status and the outcome as data."""
    from mecha_exp.cli import main

    def run(*words: str):
        monkeypatch.setattr("sys.argv", ["mecha_exp", "reproduce", *words, "--json"])
        status = main()
        printed = capsys.readouterr()
        return status, json.loads(printed.out) if printed.out else printed.err

    return run


def test_from_its_folder(app, inputs, outcome):
    app(*MERGE, "engine.compute_dtype=float64", "output.dtype=bfloat16")
    run = only_run(inputs)

    status, found = outcome(str(run))

    assert (status, found["identical"], found["differences"]) == (0, True, [])
    assert f"{(run / 'model.safetensors').stat().st_size:,} bytes" in found["compared"]
    assert not [p for p in inputs.iterdir() if p.name.startswith(".reproduce")]


def test_from_its_folder_where_the_model_was_deleted(app, inputs, outcome):
    app(*MERGE)
    (only_run(inputs) / "model.safetensors").unlink()

    assert outcome(str(only_run(inputs)))[0] == 0


def test_from_the_model_alone_on_another_machine(app, inputs, outcome, tmp_path_factory, monkeypatch):
    app(*MERGE, "engine.compute_dtype=float64", "output.dtype=bfloat16", "output.path=m.safetensors")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "models").mkdir()
    shutil.move(inputs / "m.safetensors", elsewhere)
    shutil.move(inputs / "a.safetensors", elsewhere / "models")
    shutil.move(inputs / "b.safetensors", elsewhere / "models" / "renamed.safetensors")
    monkeypatch.chdir(elsewhere)

    status, found = outcome("m.safetensors", "--models-dir", "models", "--output", "again.safetensors")

    assert (status, found["differences"]) == (0, [])
    assert Path("again.safetensors").read_bytes() == Path("m.safetensors").read_bytes()
    assert "b.safetensors, found as models/renamed.safetensors, the same content" in found["inputs"]


def test_from_mlflow_where_the_folder_is_gone(app, inputs, outcome):
    app(*MERGE, "evaluator=none", tracked=True)
    run_id = json.loads((only_run(inputs) / "run.json").read_text())["run_id"]
    shutil.rmtree(inputs / "outputs" / "runs")

    status, found = outcome(run_id)

    assert (status, found["from"]) == (0, f"the MLflow run {run_id}")


def test_by_the_numbers_where_no_model_was_kept(app, folder, outcome):
    app("recipe=dare_ties", "output=none", "evaluator=digits")
    run = only_run(folder)

    status, found = outcome(str(run))
    assert (status, found["identical"]) == (0, True)
    assert "numbers, since no file was kept" in found["compared"]

    record = json.loads((run / "run.json").read_text())
    record["metrics"]["accuracy"] = 0.123
    (run / "run.json").write_text(json.dumps(record))
    status, found = outcome(str(run))
    assert status == 1
    assert [d.split(" ")[:2] for d in found["differences"]] == [["accuracy:", "0.123"]]


def test_an_input_that_is_missing_is_named_with_its_hash(app, inputs, outcome):
    app(*MERGE, "output.path=m.safetensors")
    (inputs / "a.safetensors").unlink()

    status, found = outcome("m.safetensors")

    assert (status, found["made"]) == (1, False)
    assert found["differences"][0].startswith("the input a.safetensors is missing (SHA-256 ")


def test_an_input_that_has_changed_is_named_with_both_hashes_and_used_if_told_so(app, inputs, outcome):
    app(*MERGE, "output.path=m.safetensors")
    changed = load_file("a.safetensors")
    changed["layer.1.weight"][0, 0] += 1
    save_file(changed, "a.safetensors")
    os.utime("a.safetensors", ns=(1, 1))

    status, found = outcome("m.safetensors")
    assert (status, found["made"]) == (1, False)
    assert "the input a.safetensors has changed: SHA-256 was" in found["differences"][0]

    status, found = outcome("m.safetensors", "--anyway")
    assert (status, found["made"]) == (1, True)
    assert "layer.1.weight: 1 of 40 values, by up to 0.75" in found["differences"]


def test_another_version_is_named(app, inputs, outcome):
    app(*MERGE)
    path = only_run(inputs) / "run.json"
    record = json.loads(path.read_text())
    record["tags"]["version/torch"] = "1.0"
    path.write_text(json.dumps(record))

    status, found = outcome(str(path.parent))

    assert status == 0
    assert found["environment"] == [f"version/torch: 1.0 then, {torch.__version__} now"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a.safetensors", "a.safetensors does not say how it was made"),
        ("nothing", "there is no run 'nothing' below outputs"),
    ],
)
def test_what_cannot_be_made_again(inputs, outcome, word, message):
    assert message in outcome(word)[1]


def test_a_run_that_failed_is_none_to_make_again(app, inputs, outcome):
    app(*MERGE)
    path = only_run(inputs) / "run.json"
    path.write_text(path.read_text().replace('"FINISHED"', '"FAILED"'))

    assert "failed, so there is nothing to make again" in outcome(str(path.parent))[1]


def test_a_model_says_what_it_was_made_of(app, inputs):
    app(*MERGE, "output.path=m.safetensors")

    with safe_open("m.safetensors", "pt") as file:
        origin = json.loads(file.metadata()["mecha_origin"])
    assert [len(content) for content in origin["inputs"]] == [64, 64]
    assert origin["engine"]["compute_dtype"] == "auto"
    assert "weighted_sum" in origin["methods"]


def test_models_are_compared_key_by_key(tmp_path):
    a = {"x": torch.zeros(3), "y": torch.zeros(2), "z": torch.ones(2), "n": torch.tensor([torch.nan])}
    b = {"x": torch.tensor([0.0, 0.5, 0.0]), "y": torch.zeros(2, 1), "w": torch.ones(2), "n": a["n"]}
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")

    found = describe_differences(tmp_path / "a.safetensors", tmp_path / "b.safetensors")

    assert sorted(found) == [
        "keys that are new: w",
        "keys that are not there any more: z",
        "x: 1 of 3 values, by up to 0.5",
        "y: torch.float32 (2,) was, torch.float32 (2, 1) is",
    ]


def test_the_machine_says_what_its_processor_can_do():
    found = machine()

    assert found["machine/cores"].isdecimal()
    assert found["machine/torch_uses"] == torch.backends.cpu.get_cpu_capability()


def test_what_is_not_committed_is_a_diff(tmp_path, monkeypatch):
    import subprocess

    def git(*words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "file.txt").write_text("before\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "file.txt").write_text("after\n")
    (tmp_path / "new.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    git_changes.cache_clear()

    changes = git_changes()
    git_changes.cache_clear()

    assert "-before\n+after" in changes
    assert "# untracked: new.txt" in changes


def test_a_plugin_that_is_gone_is_taken_from_the_run(app, inputs, tmp_path_factory):
    """In processes of their own: this one would still have the plugin in memory."""
    (inputs / "plug").mkdir()
    (inputs / "plug" / "own_blend.py").write_text(
        "from torch import Tensor\nfrom mecha_exp import Parameter, Return, merge_method\n"
        "@merge_method(elementwise=True)\n"
        "def own_blend(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):\n"
        "    return a * 0.3 + b\n"
    )
    (inputs / "conf" / "recipe").mkdir(parents=True)
    (inputs / "conf" / "recipe" / "own.yaml").write_text(
        "\n# @package _global_\nrecipe:\n  method: own_blend\n  a: a.safetensors\n  b: b.safetensors\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mecha_exp", *words]
        return subprocess.run(
            command, cwd=inputs, env=environment, capture_output=True, text=True, check=False
        )

    words = ("--config-dir=conf", "recipe=own", "plugins=[plug/own_blend.py]", "evaluator=none")
    made = run(*words, "tracking=none")
    assert made.returncode == 0, made.stderr
    shutil.rmtree(inputs / "plug")

    again = run("reproduce", str(only_run(inputs)))

    assert again.returncode == 0, again.stdout + again.stderr
    assert "identical" in again.stdout

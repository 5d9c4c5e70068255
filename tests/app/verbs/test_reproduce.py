"""A result is made again from its folder, from MLflow, or from the model; what stands against it is said."""

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sweep_folders import only_run

from mecha_exp.app import provenance
from mecha_exp.app.provenance import git_changes, git_state
from mecha_exp.app.reproduction.comparison import describe_differences
from mecha_exp.app.reproduction.sources import programs_in, restore_plugins
from mecha_exp.system.machine import machine

MERGE = ("recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]", "alpha=0.25")
NAMES = ("a", "b")


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


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_with_the_other_suffix_of_safetensors_is_a_file(app, inputs, outcome, is_there):
    app(*MERGE, "output.path=merged.sft")
    if not is_there:
        (inputs / "merged.sft").unlink()

    status, found = outcome(str(only_run(inputs)))

    assert (status, found["identical"], found["differences"]) == (0, True, [])


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


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("name", ["best.safetensors", "best"])
def test_the_model_is_written_where_it_is_asked_for(app, inputs, outcome, name: str, is_kept: bool):
    app(*MERGE, *([] if is_kept else ["output=none"]))

    status, found = outcome(str(only_run(inputs)), "--output", name)

    assert status == 0, found
    again = inputs / name if name.endswith(".safetensors") else inputs / name / "model.safetensors"
    shutil.rmtree(only_run(inputs))
    app(*MERGE, "output.path=straight.safetensors", "rerun=always")
    tensors, straight = load_file(again), load_file(inputs / "straight.safetensors")
    assert tensors.keys() == straight.keys()
    assert all(torch.equal(tensors[key], straight[key]) for key in straight)


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


@pytest.fixture
def repositories(tmp_path, monkeypatch):
    """Makes repositories with one commit; the caches of provenance are empty before and after."""

    def git(folder: Path, *words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
        command = ["git", *identity, *words]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    def make(name: str, *files: str) -> tuple[Path, str]:
        """A repository, and its commit."""
        folder = tmp_path / name
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("before\n")
        git(folder, "init")
        git(folder, "add", ".")
        git(folder, "commit", "-m", "first")
        return folder, git(folder, "rev-parse", "HEAD")

    def forget() -> None:
        for cached in (
            provenance.git_state,
            provenance.git_changes,
            provenance._repositories,
            provenance._checkout,
        ):
            cached.cache_clear()

    forget()
    yield make
    forget()


def test_what_is_not_committed_is_a_diff(repositories, monkeypatch):
    folder, commit = repositories("mine", "file.py")
    (folder / "file.py").write_text("after\n")
    (folder / "new.txt").write_text("x")
    monkeypatch.chdir(folder)

    changes = git_changes()["changes.diff"]

    assert "-before\n+after" in changes
    assert "# untracked: new.txt" in changes
    assert git_state()["git/commit"] == commit
    assert git_state()["git/dirty"] == "true"


def test_the_checkout_of_mecha_exp_is_kept_beside_the_users_own_repository(repositories, monkeypatch):
    mine, commit = repositories("mine", "file.py")
    checkout, of_checkout = repositories("checkout", "mecha_exp/__init__.py", "methods/linear.py")
    (checkout / "methods" / "linear.py").write_text("after\n")
    (checkout / "methods" / "new.py").write_text("a method\n")
    monkeypatch.setattr(provenance, "__file__", str(checkout / "mecha_exp" / "app" / "provenance.py"))
    monkeypatch.chdir(mine)

    state, changes = git_state(), git_changes()

    assert (state["git/commit"], state["git/dirty"]) == (commit, "false")
    assert (state["git/mecha_exp/commit"], state["git/mecha_exp/dirty"]) == (of_checkout, "true")
    assert changes["changes.diff"] == ""
    patch = mine / "changes.patch"
    patch.write_text(changes["changes_of_mecha_exp.diff"])
    subprocess.run(["git", "reset", "--hard", "--quiet"], cwd=checkout, check=True)
    (checkout / "methods" / "new.py").unlink()
    subprocess.run(["git", "apply", str(patch)], cwd=checkout, check=True)
    assert (checkout / "methods" / "linear.py").read_text() == "after\n"
    assert (checkout / "methods" / "new.py").read_text() == "a method\n"


HOSTILE = """
[core]
    fsmonitor = "touch {ran}; false"
    hooksPath = {hooks}
    pager = "touch {ran}; cat"
    sshCommand = "touch {ran}; false"
[diff]
    external = "touch {ran}; true"
[diff "word"]
    textconv = "touch {ran}; cat"
    command = "touch {ran}; true"
[filter "clean"]
    clean = "touch {ran}; cat"
    smudge = "touch {ran}; cat"
    required = true
[filter "long"]
    process = "touch {ran}; false"
[include]
    path = more
"""


def test_a_repository_of_others_runs_none_of_their_programs(repositories, monkeypatch, tmp_path):
    """Each of git's ways to run a program by a configuration, in one."""
    folder, commit = repositories("theirs", "a.txt", "b.txt", "c.txt", "d.txt", ".gitattributes")
    ran, hooks = tmp_path / "ran", tmp_path / "hooks"
    hooks.mkdir()
    for hook in ("post-index-change", "fsmonitor-watchman", "reference-transaction", "pre-commit"):
        (hooks / hook).write_text(f"#!/bin/sh\ntouch {shlex.quote(str(ran))}\n")
        (hooks / hook).chmod(0o755)
    given = {"ran": f"'{ran}'", "hooks": f'"{hooks}"'}
    with (folder / ".git" / "config").open("a") as file:
        file.write(HOSTILE.format(**given))
    included = '[filter "included"]\n    clean = "touch {ran}; cat"\n'
    (folder / ".git" / "more").write_text(included.format(**given))
    (folder / ".gitattributes").write_text(
        "a.txt filter=clean\nb.txt filter=long\nc.txt filter=included\nd.txt diff=word\n"
    )
    for name in "abcd":
        (folder / f"{name}.txt").write_text("after!\n")
    (folder / "new.py").write_text("x")
    monkeypatch.chdir(folder)
    subprocess.run(["git", "status"], check=False, capture_output=True)
    was_armed = ran.exists()
    ran.unlink(missing_ok=True)

    state, changes = git_state(), git_changes()

    assert was_armed and not ran.exists()
    assert state["git/commit"] == commit and state["git/dirty"] == "true"
    assert changes["changes.diff"].count("-before\n+after!") == 4


def test_git_is_asked_in_one_place_alone():
    package = Path(provenance.__file__).parents[1]
    callers = [path for path in package.rglob("*.py") if '"git"' in path.read_text()]

    assert [path.name for path in callers] == ["provenance.py"]
    assert Path(provenance.__file__).read_text().count('"git"') == 1


def test_one_repository_is_named_once_and_an_installed_package_has_none(repositories, monkeypatch):
    mine, commit = repositories("mine", "file.py")
    monkeypatch.setattr(provenance, "__file__", str(mine / "site-packages" / "mecha_exp" / "app" / "x.py"))
    (mine / "site-packages" / "mecha_exp").mkdir(parents=True)
    monkeypatch.chdir(mine)

    assert git_state() == {"git/commit": commit, "git/dirty": "false"}


def test_reproduce_names_the_changes_that_a_run_was_made_with(app, inputs, outcome):
    app(*MERGE)
    run = only_run(inputs)
    (run / "changes_of_mecha_exp.diff").write_text("a patch")
    record = json.loads((run / "run.json").read_text())
    record["tags"]["git/mecha_exp/commit"] = "0" * 40
    (run / "run.json").write_text(json.dumps(record))

    found = outcome(str(run))[1]["environment"]

    assert any(line.startswith(f"git/mecha_exp/commit: {'0' * 40} then") for line in found)
    path = Path("outputs", "runs", run.name, "changes_of_mecha_exp.diff")
    assert any(line.endswith(str(path)) and line.startswith("uncommitted changes") for line in found)


PLUGIN = """
from torch import Tensor
from mecha_exp import Parameter, Return, evaluator, merge_method
@merge_method(elementwise=True)
def {name}(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):
    return a * 0.3 + b
@evaluator("{name}_sum", metric="sum")
def measure(state_dict):
    return {{"sum": sum(float(t.sum()) for t in state_dict.values())}}
"""


@pytest.mark.heavy
def test_a_plugin_of_methods_and_evaluators_that_is_gone_is_taken_from_the_run(inputs, as_a_user):
    """In processes of their own: this one would still have the plugin in memory."""
    (inputs / "plug").mkdir()
    (inputs / "plug" / "own_blend.py").write_text(PLUGIN.format(name="own_blend"))
    (inputs / "conf" / "recipe").mkdir(parents=True)
    (inputs / "conf" / "recipe" / "own.yaml").write_text(
        "\n# @package _global_\nrecipe:\n  method: own_blend\n  a: a.safetensors\n  b: b.safetensors\n"
    )
    words = ("--config-dir=conf", "recipe=own", "plugins=[plug/own_blend.py]", "evaluator.name=own_blend_sum")
    made = as_a_user(*words, "evaluator.weight_stats=false", "output=none", "tracking=none", cwd=inputs)
    assert made.status == 0, made.err
    shutil.rmtree(inputs / "plug")

    refused = as_a_user("reproduce", str(only_run(inputs)), cwd=inputs)
    again = as_a_user("reproduce", str(only_run(inputs)), "--trust", cwd=inputs)

    assert refused.status == 1 and "names what is run as code: plug/own_blend.py" in refused.err
    assert again.status == 0, again.out + again.err
    assert "identical: 1 number, since no file was kept: sum" in again.out


@pytest.mark.parametrize(
    ("plugins", "loaded", "restored"),
    [
        (["plug/own.py"], [], ["own.py"]),
        (["plug"], [], ["helper.py", "own.py"]),  # a folder
        (["pack.part"], [], ["pack.part"]),  # a module, which is found by its name
        (["plug/own.py"], ["elsewhere/own.py"], []),
        (["here.py", "plug/own.py"], [], ["here.py", "own.py"]),
        (["plug/lost.py"], [], ["plug/lost.py"]),  # which is an error when it is loaded
    ],
)
def test_a_plugin_that_has_moved_is_found_or_named(folder, monkeypatch, plugins, loaded, restored):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "here.py").write_text("")
    (folder / "run").mkdir()
    (folder / "run" / "sources.json").write_text(
        json.dumps({"own.py": "1", "helper.py": "2", "pack/__init__.py": "", "pack/part.py": "3"})
    )

    names = restore_plugins(folder / "run", plugins, folder / "scratch", loaded)

    kept = folder / "scratch" / "sources"
    assert [name.removeprefix(f"{kept}{os.sep}") for name in names] == restored


@pytest.mark.parametrize(
    ("config", "programs"),
    [
        ({"plugins": ["a.py", "pack.part"]}, ["a.py", "pack.part"]),
        ({"plugins": "a.py"}, ["a.py"]),
        (
            {"evaluator": {"name": "perplexity", "trust_remote_code": True}},
            ["evaluator.trust_remote_code=True"],
        ),
        ({"evaluator": {"name": "forward", "module": "net.py:make"}}, ["evaluator.module=net.py:make"]),
        (
            {"evaluator": {"name": "a", "also": [{"name": "lm_eval", "include_path": "mine"}]}},
            ["evaluator.include_path=mine"],
        ),
        ({"plugins": None, "evaluator": {"name": "digits", "trust_remote_code": False}}, []),
        ({}, []),
    ],
)
def test_what_is_run_as_code_is_found_in_a_configuration(config, programs):
    assert programs_in(config) == programs


@pytest.mark.parametrize("trusted", [False, True])
def test_a_plugin_runs_only_where_the_run_is_trusted(app, inputs, outcome, trusted):
    app(*MERGE)
    Path("theirs.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    path = only_run(inputs) / "recipe.yaml"
    path.write_text(path.read_text().replace("plugins: []", "plugins: [theirs.py]"))

    done = app("reproduce", str(path.parent), *["--trust"] * trusted)

    assert Path("ran").exists() == trusted
    assert done.status == (0 if trusted else 1)
    assert trusted or "names what is run as code: theirs.py. Read it first" in done.err


def test_a_plugin_that_is_lost_is_asked_for(app, inputs, outcome):
    app(*MERGE)
    path = only_run(inputs) / "recipe.yaml"
    path.write_text(path.read_text().replace("plugins: []", "plugins: [lost.py]"))

    assert (
        "lost.py does not exist. If it lies elsewhere by now, name it by --plugin."
        in outcome(str(path.parent), "--trust")[1]
    )


def test_in_a_folder_that_cannot_be_written(app, inputs, outcome, monkeypatch):
    app(*MERGE)

    def read_only(**where: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("mecha_exp.checkpoint.transaction.space.tempfile.TemporaryFile", read_only)

    status, found = outcome(str(only_run(inputs)))

    assert (status, found) == (1, f"error: {inputs / 'new'} cannot be written: {inputs} is read-only.\n")

"""Processes that cannot see each other's numbers, as in two containers, and several that begin at once."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from programs import environment, program
from safetensors.torch import load_file, save_file
from sweep_folders import mlflow_statuses, records

from mecha_exp import CheckpointError, merge, weighted_sum

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]
RECIPE = """
# @package _global_
recipe:
  method: endless
  a: a.safetensors
  b: b.safetensors
"""
SWEEP = ("tracking=none", "evaluator=none", "-m", "hydra.sweep.dir=shared")


def has_namespaces() -> bool:
    """Whether this user may begin a process with a numbering of its own."""
    try:
        return not subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode
    except OSError:
        return False


@pytest.fixture
def other_container(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep in the folder `shared` that merges without end, in another numbering of processes."""
    if not has_namespaces():
        pytest.skip("no process namespaces here")
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"w": torch.full((4,), value), "x": torch.ones(4)}, folder / f"{name}.safetensors")
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "conf" / "recipe" / "endless.yaml").write_text(RECIPE)
    words = ["--config-dir=conf", "recipe=endless", "output.dtype=fp32,fp16", "engine.workers=1", *SWEEP]
    command = [*UNSHARE, *program("endless", 2, "app", *words)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(line == "begun\n" for line in process.stdout)
            yield process
        finally:
            process.kill()


def test_another_container_keeps_its_sweep_its_outputs_and_their_partial_files(app, folder, other_container):
    models = folder / "a.safetensors", folder / "b.safetensors"
    inputs = (f"models.base={models[0]}", f"models.experts=[{models[1]}]")
    command = ("recipe=weighted_sum", "alpha=0.25,0.5", *inputs, *SWEEP)
    output = folder / "shared" / "0" / "model.safetensors"
    recipe = weighted_sum(*map(str, models), alpha=0.5)

    refused = app(*command)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is being written by process 1 on"):
        merge(recipe, output)
    cleaned = app("clean", "--yes", ".")

    assert refused.status == 1
    assert "another process runs a sweep in shared. Wait for it, or choose another folder" in refused.err
    assert not (folder / "shared" / "sweep.csv").exists()
    assert cleaned.out.count("in use: left alone") == 3  # the sweep and its two points
    assert output.with_name(".model.safetensors.mecha-partial").exists()

    other_container.kill()
    other_container.communicate()  # until the last of its processes is gone
    merge(recipe, output)
    assert float(load_file(output)["w"][0]) == 1.5
    assert app(*command).status == 0


@pytest.mark.heavy
def test_a_sweep_that_is_started_four_times_at_once_in_one_folder_runs_once(folder):
    command = [sys.executable, "-m", "mecha_exp", "alpha=0.3,0.5", "output=none", "evaluator=none", "-m"]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, "hydra.sweep.dir=shared"], env=environment(), stderr=pipe, text=True)
        for _ in range(4)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]

    statuses = [process.returncode for process in processes]
    assert 0 in statuses
    assert set(statuses) <= {0, 1}
    for status, error in zip(statuses, errors, strict=True):
        assert not status or error.startswith("error: another process runs a sweep in shared."), error
    assert [record["status"] for record in records(folder / "shared")] == ["FINISHED"] * 2
    assert mlflow_statuses(folder) == ["FINISHED"] * 3  # the sweep's and its points'


@pytest.mark.heavy
def test_the_lock_of_a_sweep_on_a_machine_that_is_lost_is_named(app, folder):
    burnt = "import platform, sys; platform.node = lambda: 'burnt'; from mecha_exp.cli import main; main()"
    words = ["alpha=0.3,0.5", "output=none", *SWEEP]
    lost = subprocess.Popen(
        [sys.executable, "-c", burnt, *words], env=environment(), stdout=subprocess.DEVNULL
    )
    while not any(path.read_text() for path in (folder / "shared").glob(".*-lock")):
        assert lost.poll() is None
    lost.kill()
    lost.wait()

    refused = app(*words)
    lock = re.search(r"If that process is gone, delete (\S+)\.$", " ".join(refused.err.split()))
    assert refused.status == 1 and lock
    Path(lock[1]).unlink()

    assert app(*words).status == 0
    assert [record["status"] for record in records(folder / "shared")] == ["FINISHED"] * 2

"""One merge by many tasks: the bytes of one process, whatever dies, or an error that says why not."""

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mecha_exp import CheckpointError, ConfigError, EngineOptions, Job, MergeError, merge, merge_many, plan
from mecha_exp.across import run_plan
from mecha_exp.across.shares import ShardFile, SharedMerge, distribute
from mecha_exp.across.task import Task, make
from mecha_exp.checkpoint.transaction import heartbeat
from mecha_exp.checkpoint.transaction.lock import TargetLock
from mecha_exp.checkpoint.transaction.paths import LOCK, sibling
from mecha_exp.checkpoint.transaction.recovery import find_partial_outputs
from mecha_exp.cluster import SlurmWorkers
from mecha_exp.graph.literals import as_node
from mecha_exp.graph.nodes import call
from mecha_exp.method_api import registry
from mecha_exp.plugins import load_plugins
from mecha_exp.recipe.text import serialize

PLUGIN = str(Path(__file__).with_name("across_methods.py"))
BURNT = """
import platform, sys
platform.node = lambda: "burnt"
from mecha_exp.cli import main
sys.exit(main())
"""
STAGED = Path(".many.mecha-partial")
SHARD = 20_000
ONE = EngineOptions(workers=1)
THREE = replace(ONE, across=3)


@pytest.fixture(scope="module", autouse=True)
def methods() -> Iterator[None]:
    """The methods of the plugin, registered while these tests run."""
    with registry.isolated():
        load_plugins([PLUGIN])
        yield


@pytest.fixture
def folders(tmp_path, monkeypatch) -> list[str]:
    """The folders of three models in a current folder of their own: ten layers and small files."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("abc"):
        write_model(name, seed)
        Path(name, "config.json").write_text(json.dumps({"model_type": "tiny", "torch_dtype": "float32"}))
        Path(name, "tokenizer.json").write_text("{}")
    return ["a", "b", "c"]


@pytest.fixture(
    params=["processes", *(pytest.param(name, marks=pytest.mark.libraries) for name in ("ray", "slurm"))]
)
def cluster(request) -> str:
    """Where the tasks run: here, on Ray, or on a Slurm of this machine."""
    if request.param != "processes":
        pytest.importorskip("ray" if request.param == "ray" else "submitit")
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    return request.param


def write_model(name: str, seed: int, odd: float = 0.0) -> None:
    """Write the weights of a model, one of which is odd."""
    torch.manual_seed(seed)
    layers = {f"layers.{number}.weight": torch.randn(48, 48) for number in range(10)}
    layers["layers.9.weight"][0, 0] = odd
    Path(name).mkdir(exist_ok=True)
    save_file({**layers, "steps": torch.tensor(7), "empty": torch.zeros(0)}, f"{name}/model.safetensors")


def hashes(folder: Path | str) -> dict[str, str]:
    """The SHA-256 of every file in a folder, by its path there."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def job(recipe, output="many", **more) -> Job:
    return Job(recipe, Path(output), shard_size=SHARD, **more)


def by_hand(made: Job, options: EngineOptions, *tasks: int) -> None:
    """Make single tasks as several machines would that share only the folder."""
    for task in tasks:
        with plan([made], replace(options, task=task)) as planned:
            run_plan(planned)


def commit(made: Job, options: EngineOptions = THREE):
    with plan([made], options) as planned:
        return run_plan(planned, plugins=[PLUGIN])


RECIPES = {
    "a mean": lambda a, b, c: call("n_average", a, b, c),
    "reductions": lambda a, b, c: call("ties", a, b, c, density=0.3),
    "numbers of the whole model": lambda a, b, c: call("pcb", a, b, c),
    "values by key": lambda a, b, c: call(
        "weighted_sum", a, b, alpha={"layers.1.weight": 0.2, "default": 0.6}
    ),
}


@pytest.mark.parametrize("make_recipe", RECIPES.values(), ids=RECIPES)
def test_tasks_by_hand_and_a_commit_give_the_bytes_of_one_process(folders, make_recipe):
    recipe = make_recipe(*folders)
    merge(recipe, "one", ONE, shard_size=SHARD, card=False)
    made = job(recipe)

    by_hand(made, THREE, 2, 1, 3)
    assert not Path("many").exists()
    report = commit(made)

    assert hashes("many") == hashes("one")
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < hashes("many").keys()
    assert (report.resumed_keys, report.bytes_read) == (report.keys - 1, 0)  # the empty key is not read


def test_tasks_give_the_bytes_of_one_process_and_one_that_is_killed_is_run_again(folders, cluster):
    recipe = call("deadly_mean", "a", "b")
    merge(recipe, "one", ONE, shard_size=SHARD, card=False)
    Path("graves").mkdir()

    with plan([job(recipe)], replace(ONE, across=2, cluster=cluster)) as planned:
        report = run_plan(planned, plugins=[PLUGIN])

    assert Path("graves", "first").exists()  # a worker was killed
    assert hashes("many") == hashes("one")
    assert report.resumed_keys >= 1
    assert [path.name for path in Path().glob(".*")] == []


def start_slowly(*words: str, code: str = "", seconds: float = 0.2) -> subprocess.Popen:
    """Start `merge slow.mecha`, whose method takes so long for each key, perhaps by code of one's own."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "mecha_exp"]), "merge", "slow.mecha"]
    command += [*words, f"--plugin={PLUGIN}", f"--shard-size={SHARD}"]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "SLOW_SECONDS": str(seconds)}
    return subprocess.Popen([*command, "--no-card", "-o", "many"], env={**os.environ, **environment})


def await_keys(count: int, process: subprocess.Popen) -> None:
    """Wait until so many keys are finished."""
    while sum(path.read_bytes().count(b"layers") for path in STAGED.glob("*-journal")) < count:
        assert process.poll() is None
        time.sleep(0.05)


def await_locks(process: subprocess.Popen) -> None:
    """Wait until a file is locked, whose journal says for which merge."""
    while not [*STAGED.glob("*-lock")] or not [*STAGED.glob("*-journal")]:
        assert process.poll() is None
        time.sleep(0.05)


@pytest.fixture
def slow(folders) -> None:
    """The file of a recipe whose method is slow, and the folder `one` that it makes."""
    merge(call("slow_mean", "a", "b"), "one", ONE, shard_size=SHARD, card=False)
    Path("slow.mecha").write_text(serialize(call("slow_mean", "a", "b")))


@pytest.mark.heavy
def test_after_the_head_is_killed_its_workers_end_and_the_same_command_goes_on(slow, cluster):
    head = start_slowly("engine.across=2", f"engine.cluster={cluster}", seconds=3)
    await_keys(3, head)
    head.kill()
    head.wait()

    again = start_slowly("engine.across=2", f"engine.cluster={cluster}")

    assert again.wait(timeout=300) == 0
    assert hashes("many") == hashes("one")


@pytest.mark.heavy
def test_the_error_names_the_locks_of_a_machine_that_is_lost_and_the_merge_goes_on_without_them(slow):
    lost = start_slowly("engine.across=2", "engine.task=1", code=BURNT)
    await_keys(1, lost)
    lost.kill()
    lost.wait()
    made, two = job(call("slow_mean", "a", "b")), replace(ONE, across=2)

    for options in (ONE, two):
        with pytest.raises(CheckpointError, match=rf"locked by process {lost.pid} on burnt\.") as error:
            commit(made, options)
    locks = Path(re.search(r"If they are gone, delete (\S+)\.$", str(error.value))[1])
    for lock in locks.parent.glob(locks.name):
        lock.unlink()
    report = commit(made, two)

    assert hashes("many") == hashes("one")
    assert 1 <= report.resumed_keys < report.keys


BEATING = "from mecha_exp.checkpoint.transaction import heartbeat; heartbeat.BEAT_SECONDS = 0.1" + BURNT
OF_TWO = "engine.across=2", "engine.task=1"


@pytest.mark.heavy
def test_a_machine_that_has_been_silent_for_long_is_taken_for_lost(slow, monkeypatch):
    lost = start_slowly(*OF_TWO, code=BURNT)
    await_keys(1, lost)
    lost.kill()
    lost.wait()
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.5)
    time.sleep(1)

    with pytest.raises(CheckpointError, match=rf"locked by process {lost.pid} on burnt\."):
        commit(job(call("n_average", "a", "b")), replace(ONE, across=2))  # another merge does not take over
    report = commit(job(call("slow_mean", "a", "b")), replace(ONE, across=2))

    assert hashes("many") == hashes("one")
    assert 1 <= report.resumed_keys < report.keys


@pytest.mark.heavy
def test_a_machine_that_gives_signs_of_life_is_waited_for(slow, monkeypatch):
    slow_one = start_slowly(*OF_TWO, code=BEATING, seconds=30)
    await_locks(slow_one)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 2)
    time.sleep(4)

    try:
        with pytest.raises(CheckpointError, match=rf"locked by process {slow_one.pid} on burnt\."):
            commit(job(call("slow_mean", "a", "b")), replace(ONE, across=2))
    finally:
        slow_one.kill()
        slow_one.wait()


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_machine_that_comes_back_after_it_was_taken_for_lost_changes_no_byte(slow, monkeypatch):
    sleeper = start_slowly(*OF_TWO, code=BEATING)
    await_keys(1, sleeper)
    sleeper.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.5)
    time.sleep(1)

    commit(job(call("slow_mean", "a", "b")), replace(ONE, across=2))
    sleeper.send_signal(signal.SIGCONT)
    sleeper.wait(timeout=120)

    assert hashes("many") == hashes("one")


def test_what_is_missing_at_the_commit_is_made_then(folders):
    made = job(call("n_average", "a", "b"))
    merge(made.recipe, "one", ONE, shard_size=SHARD, card=False)
    by_hand(made, THREE, 1, 3)

    report = commit(made, ONE)  # a merge in one process goes on from what the tasks have finished

    assert hashes("many") == hashes("one")
    assert 0 < report.resumed_keys < report.keys


def test_statistics_and_notes_of_tasks_are_in_the_report(folders):
    made = job(call("weighted_sum", "a", "b", alpha=0.5), statistics=True)
    with plan([replace(made, output={}, shard_size=None)], ONE) as planned:
        alone = run_plan(planned)
    by_hand(made, THREE, 1, 2, 3)

    together = commit(made)

    for model, by_key in alone.moments[0].items():
        assert all(by_key[key].equal(together.moments[0][model][key]) for key in by_key)


def test_each_task_reads_and_writes_its_part_alone(folders):
    made = job(call("n_average", "a", "b"))
    with plan([made], THREE) as planned:
        merge_by_three = SharedMerge.of(planned, 3)
        total = (planned.bytes_read, planned.bytes_written)
    reports = []
    for task in (1, 2, 3):
        with plan([made], replace(THREE, task=task)) as planned:
            reports.append(run_plan(planned))

    assert [report.bytes_read for report in reports] == [share.read for share in merge_by_three.shares]
    assert (sum(r.bytes_read for r in reports), sum(r.bytes_written for r in reports)) == total


def test_inputs_that_another_machine_sees_otherwise_are_an_error(folders):
    with plan([job(call("n_average", "a", "b"))], THREE) as planned:
        task = Task.of(SharedMerge.of(planned, 3), 1, ())
    write_model("b", 8)

    with pytest.raises(MergeError, match="would make other bytes than the machine that started the merge"):
        make(task)


@pytest.mark.heavy
def test_a_task_that_fails_is_named_and_keeps_what_is_finished(folders):
    write_model("b", 1, odd=math.nan)

    with (
        plan([job(call("n_average", "a", "b"))], replace(ONE, across=2)) as planned,
        pytest.raises(
            MergeError, match=r"^task \d of 2: .*layers\.9(.|\n)*the same command goes on from there"
        ),
    ):
        run_plan(planned)

    assert not Path("many").exists()
    assert any(Path(".many.mecha-partial").iterdir())


def test_shards_that_a_task_writes_are_left_alone(folders):
    made = job(call("n_average", "a", "b"))
    by_hand(made, THREE, 1)
    shard = next(path for path in Path(".many.mecha-partial").iterdir() if path.name.endswith("-partial"))
    target = shard.with_name(shard.name.removeprefix(".").removesuffix(".mecha-partial"))
    lock = TargetLock(target)
    try:
        with pytest.raises(
            CheckpointError, match=rf"made by others: 1 of its files are locked by process {os.getpid()} on"
        ):
            commit(made, ONE)
        assert [left.in_use for left in find_partial_outputs([Path()])] == [True]
    finally:
        lock.release()


def test_the_lock_of_a_lost_machine_is_freed(folders):
    with plan([job(call("n_average", "a", "b"))], THREE) as planned:
        merge_by_three = SharedMerge.of(planned, 3)
    share, folder = merge_by_three.shares[0], merge_by_three.staged
    folder.mkdir()
    for file in share.files:
        sibling(folder / file.name, LOCK).write_text(json.dumps({"pid": 7, "host": "a machine that burnt"}))

    share.free_locks(folder)

    by_hand(job(call("n_average", "a", "b")), THREE, 1)
    assert share.is_made(folder, merge_by_three.token)


def test_what_cannot_be_made_by_many_is_refused(folders):
    recipe = call("n_average", "a", "b")
    one_file = "is written as one file, which one process makes. Let the output be a folder of several"
    refused = {
        "engine.across makes one model at a time, and there are 2": [job(recipe), job(recipe, "other")],
        "engine.across needs an output on a disk that all tasks see: name a folder": [Job(recipe, {})],
        f"one.safetensors {one_file}": [Job(recipe, Path("one.safetensors"))],
        f"folder {one_file}": [Job(recipe, Path("folder"))],
        "models in memory are known to one process only": [job(as_node({"w": torch.ones(9, 9)}))],
    }
    for words, jobs in refused.items():
        with plan(jobs, THREE) as planned, pytest.raises(MergeError, match=words):
            run_plan(planned)


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match=r"^task=4: expected the number of a task from 1 to across=3$"):
        EngineOptions(across=3, task=4)
    with pytest.raises(ConfigError, match=r"^task=1: expected .* from 1 to across, which is not set$"):
        EngineOptions(task=1)
    with pytest.raises(
        ConfigError, match=r"^cluster: expected processes, ray, .* got 'rey'. Did you mean 'ray'"
    ):
        EngineOptions(cluster="rey")
    with pytest.raises(ConfigError, match="merge_many makes its models in this process"):
        merge_many([], THREE)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 20))
def test_shares_are_even(sizes, count):
    files = [ShardFile(f"{number}", "", (), size, 0) for number, size in enumerate(sizes)]

    made = distribute(files, count)

    assert sorted((f for share in made for f in share.files), key=lambda f: int(f.name)) == files
    loads = [share.read for share in made]
    assert max(loads) <= max(max(sizes), sum(sizes) / count * 4 / 3 + max(sizes) / 3)


@pytest.mark.libraries
@pytest.mark.parametrize("cluster", ["ray", "slurm", "slurm-local"], indirect=True)
@pytest.mark.parametrize("count", [2, 4])
def test_workers_of_a_cluster_give_the_bytes_of_one_process(folders, cluster, count):
    recipe = call("ties", *folders, density=0.3)
    merge(recipe, "one", ONE, shard_size=SHARD, card=False)

    merge(recipe, "many", replace(ONE, cluster=cluster), shard_size=SHARD, card=False, across=count)

    assert hashes("many") == hashes("one")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_the_logs_of_jobs_stay_after_an_error_and_not_after_an_interrupt(folders, monkeypatch, error):
    pytest.importorskip("submitit")

    def broken(*_):
        raise error

    monkeypatch.setattr(SlurmWorkers, "ended", broken)
    with pytest.raises(error):
        merge(call("ties", *folders), "many", replace(ONE, cluster="slurm-local"), shard_size=SHARD, across=2)

    assert Path(".many.mecha-jobs").exists() == (error is ZeroDivisionError)

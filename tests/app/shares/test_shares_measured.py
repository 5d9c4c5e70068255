"""Shares whose evaluator has workers: processes beside the share, or actors on a cluster of Ray."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_folders import LIBRARIES, result

pytestmark = pytest.mark.libraries

EVALUATOR = '''
import os
from pathlib import Path
from mecha_exp import evaluator

@evaluator("noted", metric="spread", direction="minimize")
def noted(state_dict, *, context):
    """The spread of all tensors, with notes of where it was measured."""
    alpha = context.hyperparameters.get("alpha")
    if alpha == 0.2:
        raise ValueError("too small")
    if alpha == 0.3:
        next(iter(state_dict.values())).zero_()
    if alpha == 0.4 and not Path("lost").exists():
        Path("lost").touch()
        os._exit(7)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or "none"
    if alpha is not None:
        with open("notes", "a") as file:
            file.write(f"{alpha} {os.getpid()} {gpus}\\n")
    return {"spread": sum(float(tensor.double().std()) for tensor in state_dict.values())}
'''

SWEEP = (
    "recipe=weighted_sum", "alpha=0.1,0.2,0.3,0.4,0.5,0.6", "output=none", "tracking=none", "-m",
    "plugins=[noted.py]", "evaluator.name=noted",
)  # fmt: skip


@pytest.fixture(autouse=True)
def evaluator(folder) -> None:
    (folder / "noted.py").write_text(EVALUATOR)


def points(folder: Path, sweep: str) -> list[dict]:
    paths = sorted((folder / sweep).glob("*/run.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text()) for path in paths]


def notes(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


def comparable(point: dict) -> dict[str, object]:
    return {**result(point), "evaluations": point["evaluations"]}


@pytest.fixture(params=[*LIBRARIES, "ray on two nodes"])
def launcher(request) -> Iterator[tuple[str, ...]]:
    """Words for a launcher of one worker; with Ray on a cluster of two GPUs, which are not there.

    On two nodes the share finds its place on the first one, and its actors on the one with the GPUs.
    """
    name = request.param.split()[0]
    pytest.importorskip(LIBRARIES[name])
    words = (f"hydra/launcher={name}", "hydra.launcher.workers=1", "evaluator.workers=2")
    if name == "slurm":
        request.getfixturevalue("slurm")
    if name != "ray":
        yield words
        return
    import ray
    from ray.cluster_utils import Cluster

    request.getfixturevalue("fresh_ray")
    of_head = {"num_cpus": 3, "num_gpus": 2} if request.param == "ray" else {"num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**of_head, "include_dashboard": False})
    if request.param != "ray":
        cluster.add_node(num_cpus=2, num_gpus=2)
    yield *words, f"hydra.launcher.address={cluster.address}", "hydra.launcher.gpus=0.5"
    ray.shutdown()
    cluster.shutdown()


def test_workers_of_shares_give_the_same_results_and_what_dies_is_tried_again(launcher, app, folder):
    (folder / "lost").touch()
    alone = app(*SWEEP, "hydra.sweep.dir=alone", "store=alone-store")
    for left in ("lost", "notes"):
        (folder / left).unlink()

    outcome = app(*SWEEP, *launcher, "hydra.sweep.dir=sweep")

    assert (alone.status, outcome.status) == (1, 1), outcome.err
    ours, theirs = points(folder, "alone"), points(folder, "sweep")
    assert [comparable(p) for p in theirs] == [comparable(p) for p in ours]
    assert "ValueError: too small" in theirs[1]["error"]
    assert "it changed tensors of the model in place" in theirs[2]["error"]
    assert (folder / "lost").exists()
    measured = notes(folder)
    assert Counter(alpha for alpha, _, _ in measured) == dict.fromkeys(("0.1", "0.3", "0.4", "0.5", "0.6"), 1)
    assert len({process for _, process, _ in measured}) > 1
    assert {gpu for _, _, gpu in measured} <= ({"0", "1"} if "gpus" in launcher[-1] else {"none"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("hydra.launcher.workers=1", "hydra.launcher.gpus=0.5", "evaluator.workers=2"),
            "Ray on this machine has no place for a task with 1 CPU, 0 GPU and 2 actors, each with 1 CPU, "
            "0.5 GPU. There: 1 machine with 3 CPU, 0 GPU. Ask for less.",
        ),
        (
            ("evaluator.devices=[cpu]",),
            "evaluator.devices=['cpu'] with hydra/launcher=ray: Ray gives a worker its GPU. Use",
        ),
        (("hydra.launcher.gpus=1.5",), "gpus=1.5: Ray gives a part of one GPU or whole ones: 0.5, 1, 2."),
    ],
)
def test_what_ray_cannot_give_is_an_error_at_once(app, folder, fresh_ray, words, message):
    outcome = app(*SWEEP, "hydra/launcher=ray", *words)

    assert outcome.status == 1
    assert message in " ".join(outcome.err.split())
    assert not list(folder.rglob("run.json"))

"""Other launchers than `onepass` run the same points, in this process or others, with the same results."""

import json
import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from sweep_folders import LIBRARIES, result

from mecha_exp.app.config.jobs import Jobs
from mecha_exp.app.launchers import shares
from mecha_exp.app.launchers.onepass import OnePass
from mecha_exp.app.launchers.share import Session, run_share
from mecha_exp.app.point import UNMEASURED
from mecha_exp.app.workbench import workbench
from mecha_exp.cluster.claims import Claims
from mecha_exp.errors import ConfigError

EVALUATOR = """
import os
from mecha_exp import evaluator

@evaluator("spread", metric="spread", direction="minimize")
def spread(state_dict, *, scale: float = 1.0):
    spread = sum(float(tensor.double().std()) for tensor in state_dict.values())
    return {"spread": scale * spread, "process": os.getpid()}
"""

NO_JOBS = Jobs([], [], {}, frozenset())

SWEEP = (
    "recipe=dare_ties", "density=0.5,7,0.8", "output=none", "store=null", "-m",
    "plugins=[spread.py]", "evaluator.name=spread", "evaluator.scale=2",
)  # fmt: skip


@pytest.fixture
def points(app, folder):
    """Runs the sweep with a launcher; returns its exit status and its points."""
    (folder / "spread.py").write_text(EVALUATOR)

    def run(launcher: str, *more: str) -> tuple[int, list[dict]]:
        outcome = app(*SWEEP, f"hydra/launcher={launcher}", f"hydra.sweep.dir={launcher}", *more)
        paths = [folder / launcher / str(number) / "run.json" for number in range(3)]
        return outcome.status, [json.loads(path.read_text()) for path in paths]

    return run


def with_ours_and(launcher: str, points, *more: str) -> list[dict]:
    ours = points("onepass")
    theirs = points(launcher, *more)

    assert theirs[0] == ours[0] == 1
    assert [p["status"] for p in ours[1]] == ["FINISHED", "FAILED", "FINISHED"]
    assert [result(p) for p in theirs[1]] == [result(p) for p in ours[1]]
    return [p for p in theirs[1] if p["status"] == "FINISHED"]


def test_hydras_own_launcher_gives_the_same_results(points):
    made = with_ours_and("basic", points)

    assert {p["metrics"]["process"] for p in made} == {os.getpid()}


@pytest.mark.libraries
@pytest.mark.parametrize("launcher", LIBRARIES)
def test_shares_of_other_processes_give_the_same_results(launcher, points, request):
    if launcher == "slurm":
        request.getfixturevalue("slurm")
    pytest.importorskip(
        LIBRARIES[launcher], reason=f"the library of hydra/launcher={launcher} is not installed"
    )

    made = with_ours_and(launcher, points, "hydra.launcher.workers=2")

    processes = {p["metrics"]["process"] for p in made}
    assert os.getpid() not in processes
    assert len(processes) == 2


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("hydra/launcher=joblib",),
            "hydra/launcher=joblib ran each point by itself, and nothing was shared. Points run in shares "
            "now, each one pass of a worker: hydra/launcher=processes, or ray.",
        ),
        (
            ("hydra/launcher=processes", "hydra.launcher.workers=0"),
            "hydra.launcher.workers=0: expected a number from 1 up.",
        ),
        (
            ("hydra/launcher=processes", "hydra.launcher.gpus=1"),
            "hydra.launcher.gpus=1 with hydra/launcher=processes: its processes share the GPUs of this "
            "machine. Name them with evaluator.devices=[cuda:0,cuda:1], or use hydra/launcher=ray.",
        ),
        (
            ("hydra/launcher=ray", "hydra.launcher.shares=none"),
            "hydra.launcher.shares=none: expected a number from 1 up.",
        ),
        (
            ("hydra/launcher=slurm", "hydra.launcher.cluster=pbs"),
            "hydra.launcher.cluster=pbs: expected slurm or local.",
        ),
        (
            ("hydra/launcher=slurm", "hydra.launcher.gpus=0.5"),
            "hydra.launcher.gpus=0.5 and workers=4: jobs need whole GPUs and a number of workers.",
        ),
        (
            ("hydra/launcher=slurm", "hydra.launcher.gpus=inf"),
            "hydra.launcher.gpus=inf: expected a number from 0 up.",
        ),
        (
            ("hydra/launcher=slurm", "hydra.launcher.parameters=3"),
            "hydra.launcher.parameters=3: expected names with values, as in +hydra.launcher.parameters.",
        ),
        (
            ("hydra/launcher=ray", "hydra.launcher.address=5"),
            "hydra.launcher.address=5: expected auto, host:6379 or ray://host:10001.",
        ),
    ],
)
def test_a_launcher_that_cannot_be_is_an_error(words, message, app, folder):
    outcome = app("recipe=ties", "alpha=0.3,0.5", "output=none", "-m", *words)

    assert outcome.status == 1
    assert message in " ".join(outcome.err.split())
    assert not list(folder.rglob("run.json"))


def test_the_commands_of_the_page_about_clusters_are_composed(app):
    page = Path(__file__).parents[3] / "docs" / "clusters.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    commands = [line.split()[3:] for line in lines if line.startswith("python") and "launcher=" in line]

    assert len(commands) == 4
    for words in commands:
        plain = [word.split(",")[0] for word in words if word != "-m"]
        assert app(*plain, "--cfg", "hydra").status == 0


def test_a_share_has_room_for_the_actors_of_all_its_pools():
    points = [
        SimpleNamespace(scoring=replace(UNMEASURED, plugins=(plugin,), workers=workers))
        for plugin, workers in [("a.py", 2), ("a.py", 2), ("a.py", 3), ("b.py", 2)]
    ]

    assert shares._evaluators(points) == 2 + 3 + 2


def test_a_share_forgets_what_it_began_and_left_to_another_worker(tmp_path, monkeypatch):
    claims = Claims.begin(tmp_path)
    config = OmegaConf.create({"store": None, "rerun": "never", "hydra": {"callbacks": {}}})
    Session(config, None).keep(claims.folder)
    begun = workbench(config.store, config.rerun).measurements._started

    def launch(*_):
        begun["evaluation", "point"] = Future()

    monkeypatch.setattr(OnePass, "launch", launch)
    run_share(claims, NO_JOBS)

    assert not begun


def test_a_worker_that_does_not_see_the_store_says_so(tmp_path):
    claims = Claims.begin(tmp_path)
    store = tmp_path / "store"
    Session(OmegaConf.create({}), store).keep(claims.folder)

    with pytest.raises(
        ConfigError, match=rf"does not see the store {store}\. Choose a store=\.\.\. in a folder"
    ):
        run_share(Claims(claims.folder, "share-0"), NO_JOBS)


def test_a_share_of_the_points_for_each_machine_and_one_table_at_the_end(app, folder, passes_run):
    command = ("recipe=ties", "alpha=0.1,0.2,0.3,0.4,0.5", "output=none", "-m", "store=shared")

    for share in (1, 2):
        assert app(*command, f"sweep.share={share}/2", f"hydra.sweep.dir=node{share}").status == 0
    assert passes_run == [3, 2]
    outcome = app(*command, "hydra.sweep.dir=all")

    assert passes_run == [3, 2, 1]  # the point that the whole sweep chose, to measure it on the test images
    assert outcome.status == 0, outcome.err
    names = [json.loads((folder / "all" / str(n) / "run.json").read_text())["name"] for n in range(5)]
    assert names == [f"alpha=0.{n}" for n in (1, 2, 3, 4, 5)]
    assert all(name.removeprefix("alpha=") in outcome.out for name in names)

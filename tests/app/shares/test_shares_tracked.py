"""A sweep in shares is tracked by its head alone, at a server that may be killed in the middle."""

import json
from pathlib import Path

import pytest
from noted_sweep import EVALUATOR, POINTS, SWEEP, assert_measured_once, await_records, records, started
from sweep_folders import LIBRARIES
from tracking_server import TrackingServer

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize("launcher", LIBRARIES)
def test_a_sweep_whose_tracking_server_is_killed_is_tracked_by_the_same_command(
    launcher, postgres, folder, tmp_path_factory, free_port, request
):
    pytest.importorskip(LIBRARIES[launcher])
    if launcher == "slurm":
        request.getfixturevalue("slurm")
    (folder / "noted.py").write_text(EVALUATOR)
    server = TrackingServer(tmp_path_factory.mktemp("server"), postgres, free_port)
    try:
        words = [*SWEEP, f"hydra/launcher={launcher}", "evaluator.seconds=0.5", f"tracking.uri={server.uri}"]
        head = started(folder, *words)
        await_records(folder, head)
        server.kill()

        assert head.wait(timeout=300) == 1
        assert [r["status"] for r in records(folder)] == ["FINISHED"] * POINTS
        assert "Log them later with: python -m mecha_exp track" in (folder / "output").read_text()

        server.start()
        again = started(folder, *words)

        assert again.wait(timeout=300) == 0, (folder / "output").read_text()
        assert_measured_once(folder)
        assert len(tracked_points(server.uri, folder)) == POINTS
    finally:
        server.kill()


def tracked_points(uri: str, folder: Path) -> set[str]:
    """The names of the runs at a server that belong to the sweep in a folder and have a signature."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    parent = json.loads((folder / "sweep" / "sweep.json").read_text())["parent_run"]
    experiment = client.get_run(parent).info.experiment_id
    runs = client.search_runs([experiment], f"tags.mlflow.parentRunId = '{parent}' and tags.signature != ''")
    names = [run.info.run_name for run in runs]
    assert len(set(names)) == len(names)
    return set(names)

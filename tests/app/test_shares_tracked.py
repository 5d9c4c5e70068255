"""A sweep in shares is tracked by its head alone, at a server that may be killed in the middle."""

import importlib.util
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from noted_sweep import EVALUATOR, POINTS, SWEEP, assert_measured_once, await_records, records, started
from sweep_folders import LIBRARIES

pytestmark = pytest.mark.libraries

_BINARIES = ["/usr/lib/postgresql/15/bin", os.environ.get("PATH", "")]


class TrackingServer:
    """A server of MLflow that can be killed and started again."""

    def __init__(self, folder: Path, database: str, port: int) -> None:
        self.uri = f"http://127.0.0.1:{port}"
        options = f"server --port={port} --backend-store-uri={database} --workers=1"
        self._command = [
            sys.executable,
            "-m",
            "mlflow",
            *options.split(),
            f"--artifacts-destination={folder}",
        ]
        self._log = folder / "server.log"
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.2)

    def kill(self) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """The address of a database: on a PostgreSQL of the system's package, or SQLite where that cannot be."""
    initdb = shutil.which("initdb", path=os.pathsep.join(_BINARIES))
    if initdb is None or os.getuid() != 0 or importlib.util.find_spec("psycopg2") is None:
        yield f"sqlite:///{tmp_path}/server.db"
        return
    control = str(Path(initdb).with_name("pg_ctl"))
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:
        user, folder = pwd.getpwnam("postgres"), Path(name)
        os.chown(folder, user.pw_uid, user.pw_gid)
        data = str(folder / "data")
        run = ["runuser", "-u", "postgres", "--"]
        subprocess.run([*run, initdb, "-D", data, "-A", "trust"], check=True, capture_output=True)
        options = f"-k {folder} -c listen_addresses=''"
        start = [*run, control, "-D", data, "-o", options, "-l", f"{folder}/log", "-w", "start"]
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL)
        try:
            yield f"postgresql+psycopg2://postgres@/postgres?host={folder}"
        finally:
            stop = [*run, control, "-D", data, "-m", "immediate", "stop"]
            subprocess.run(stop, check=True, capture_output=True)


@pytest.mark.parametrize("launcher", LIBRARIES)
def test_a_sweep_whose_tracking_server_is_killed_is_tracked_by_the_same_command(
    launcher, database, folder, tmp_path_factory, free_port, request
):
    pytest.importorskip(LIBRARIES[launcher])
    if launcher == "slurm":
        request.getfixturevalue("slurm")
    (folder / "noted.py").write_text(EVALUATOR)
    server = TrackingServer(tmp_path_factory.mktemp("server"), database, free_port)
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

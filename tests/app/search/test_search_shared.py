"""Several processes search one study: a journal file, SQLite, PostgreSQL, MySQL; killed and started again."""

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import printed
from sweep_folders import records, rows, sweep_of
from two_experts import INPUTS, write_two_experts

from mecha_exp.app import loop
from mecha_exp.app.search.locks import FileLocks, MySQLLocks
from mecha_exp.app.search.shared_study import SharedStudy
from mecha_exp.app.search.space import Dimension, Space
from mecha_exp.app.search.storage import open_shared
from mecha_exp.app.search.trials import Trial
from mecha_exp.errors import ConfigError, StoreError

optuna = pytest.importorskip("optuna", minversion="4")

SPACE = Space((Dimension("a", low=0, high=1),), {"": {"a": "0"}})


def opened(url: str, **identity: object) -> SharedStudy:
    return open_shared(url, "one", SPACE, ["minimize"], identity)


def ask(trials, count):
    return [Trial({"a": (len(trials) + i) / 100}) for i in range(count)]


def untold(entry):
    return None


@pytest.fixture(params=["study.log", "sqlite:///study.db"])
def url(request: pytest.FixtureRequest, folder: Path) -> str:
    return request.param


def test_two_processes_never_have_the_same_trial_nor_more_than_all(url, folder):
    first, second = opened(url), opened(url)
    with first.at_work(), second.at_work():
        ours = first.claim(folder / "x", 10, 4, ask, untold)
        theirs = second.claim(folder / "y", 10, 4, ask, untold)
        rest = first.claim(folder / "x", 10, 4, ask, untold)
        assert second.claim(folder / "y", 10, 4, ask, untold) == []
        assert [[e.number for e in part] for part in (ours, theirs, rest)] == [
            [0, 1, 2, 3], [4, 5, 6, 7], [8, 9],
        ]  # fmt: skip

        first.tell({e.number: (float(e.number),) for e in (*ours, *rest)}, folder / "x")
        assert not first.closes(folder / "x", 10)
        second.tell({4: (4.0,), 5: None, 6: (6.0,), 7: (7.0,)}, folder / "y")
        assert second.closes(folder / "y", 10) and not first.closes(folder / "x", 10)

    values = [entry.trial.values for entry in opened(url).entries()]
    assert values == [None if n == 5 else (float(n),) for n in range(10)]


def test_the_trials_of_a_dead_process_are_taken_over_and_what_it_had_measured_is_not_run(url, folder):
    dead, alive = opened(url), opened(url)
    with dead.at_work():
        dead.claim(folder / "x", 4, 4, ask, untold)
    with alive.at_work():
        left = alive.claim(folder / "y", 4, 4, ask, lambda entry: (0.5,) if entry.number == 1 else None)
        assert [entry.number for entry in left] == [0, 2, 3]
        dead.tell({0: (9.0,)}, folder / "x")  # it was only slow to say so
        alive.tell({0: (1.0,), 2: (2.0,), 3: (3.0,)}, folder / "y")

    assert [e.trial.values for e in alive.entries()] == [(1.0,), (0.5,), (2.0,), (3.0,)]


def test_a_failed_trial_that_is_run_again_has_its_new_value(url, folder):
    study = opened(url)
    with study.at_work():
        study.claim(folder / "x", 1, 1, ask, untold)
        study.tell({0: None}, folder / "x")
        study.tell({0: (2.0,)}, folder / "x")
        assert [entry.trial.values for entry in study.resume(folder / "x", 1)] == [(2.0,)]


def test_a_journal_that_a_kill_left_in_the_middle_of_a_line_goes_on(folder):
    study = opened("study.log")
    with study.at_work():
        study.claim(folder / "x", 2, 2, ask, untold)
    Path("study.log.lock").symlink_to("study.log")  # Optuna's own, of the process that was killed
    with Path("study.log").open("a") as file:
        file.write('{"op_code": 4, "wor')

    again = opened("study.log")
    with again.at_work():
        assert [entry.number for entry in again.claim(folder / "y", 2, 2, ask, untold)] == [0, 1]


@pytest.mark.parametrize(
    ("identity", "what"),
    [({"merge": "x", "evaluator": {}}, "merge"), ({"merge": "m", "evaluator": {"": "k"}}, "evaluator")],
)
def test_a_study_of_other_merges_is_refused(url, folder, identity, what):
    opened(url, merge="m", evaluator={})

    with pytest.raises(
        ConfigError, match=f"its study 'one' searches another {what}. Give this search another"
    ):
        opened(url, **identity)


def test_a_study_that_somebody_else_has_begun_is_refused(folder):
    study = optuna.create_study(storage="sqlite:///study.db", study_name="one")
    study.add_trial(optuna.trial.create_trial(value=1.0))

    with pytest.raises(ConfigError, match="its study 'one' searches another space"):
        opened("sqlite:///study.db")


@pytest.mark.parametrize("url", ["mssql+pymssql://me:secret@host/x", "sqlite://", "oracle://x"])
def test_a_storage_without_locks_of_ours_is_refused_and_no_password_is_shown(folder, url):
    with pytest.raises(ConfigError, match="cannot be reached: a study is kept in SQLite") as raised:
        opened(url)
    assert "secret" not in str(raised.value)


def test_a_server_of_mysql_that_does_not_answer_is_said_without_the_password(folder):
    pytest.importorskip("pymysql")
    with pytest.raises(ConfigError, match=r"mysql://me:\*\*\*@127.0.0.1:1/x cannot be reached: ") as raised:
        opened("mysql://me:secret@127.0.0.1:1/x")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "driver", "package"),
    [
        ("mysql://host/x", "pymysql", "pymysql"),
        ("mysql+mysqldb://host/x", "MySQLdb", "mysqlclient"),
        ("postgresql+psycopg://host/x", "psycopg", "'psycopg[binary]'"),
    ],
)
def test_a_server_without_its_driver_says_which_package_is_missing(folder, monkeypatch, url, driver, package):
    monkeypatch.setitem(sys.modules, driver, None)

    with pytest.raises(ConfigError) as raised:
        opened(url)

    assert (
        f"{url} cannot be reached: it needs {driver}, which is not installed: pip install {package}"
        in str(raised.value)
    )


def test_a_database_that_breaks_in_the_middle_ends_the_search_in_our_words(folder):
    study = opened("sqlite:///study.db")
    with study.at_work():
        Path("study.db").write_bytes(b"not a database" * 100)
        with pytest.raises(StoreError, match=r"does not answer any more: .*the same command goes on"):
            study.claim(folder, 2, 2, ask, untold)


def test_a_process_waits_for_the_one_that_is_in(folder):
    import threading

    order, locks = [], [FileLocks(folder / "s"), FileLocks(folder / "s")]

    def enter() -> None:
        with locks[1].exclusive():
            order.append("second")

    with locks[0].exclusive():
        waiting = threading.Thread(target=enter)
        waiting.start()
        waiting.join(0.3)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]


@pytest.fixture
def words(folder: Path) -> list[str]:
    """The words of a search of the weights of two experts."""
    return [
        *("sweep=search", "sweep.trials=20", "sweep.batch=3", "name=one", "output=none", "tracking=none"),
        *write_two_experts(folder),
        *("recipe=task_arithmetic", "alpha=1", "evaluator.name=test_distance"),
        *("weights.0=interval(0,1)", "weights.1=interval(0,1)"),
    ]


def measured(folder: Path) -> list[str]:
    """The lines of all processes on what was measured, without those of the inputs."""
    inputs = {f"{x} {y}" for x, y in INPUTS.values()}
    lines = [line for file in folder.glob("*/measured.txt") for line in file.read_text().splitlines()]
    return [line for line in lines if line not in inputs]


def shared(folder: Path, url: str, words: list[str], kills: int, seed: int = 0) -> None:
    """Two processes search together; checks that they end with exactly the trials that were asked for."""
    printed("search_sharing", folder, seed, kills, 2, *words, f"sweep.storage='{url}'")

    storage = storage_of(url)
    trials = optuna.load_study(study_name="one", storage=storage).trials
    if "://" in url:
        storage.engine.dispose()
    assert sorted(trial.user_attrs["point"] for trial in trials) == list(range(20))
    assert all(trial.state.name == "COMPLETE" for trial in trials)
    lines = measured(folder)
    assert len(set(lines)) == 20 and (kills or len(lines) == 20)
    tables = [
        len(rows(sweep)) for sweep in folder.glob("*/outputs/multiruns/*") if (sweep / "sweep.csv").exists()
    ]
    assert max(tables) == 20


def storage_of(url: str):
    if "://" in url:
        return optuna.storages.RDBStorage(url)
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(url))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.heavy
@pytest.mark.parametrize("kills", [0, 8])
@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_two_processes_end_with_exactly_the_trials_that_were_asked_for(folder, words, kind, kills):
    url = f"{folder}/study.log" if kind == "journal" else f"sqlite:///{folder}/study.db"
    shared(folder, url, words, kills)


@pytest.mark.libraries
@pytest.mark.parametrize("kills", [0, 8])
def test_two_processes_share_a_study_in_postgresql(folder, words, postgres, kills):
    shared(folder, postgres, words, kills)


@pytest.fixture
def mysql(tmp_path: Path) -> Iterator[str]:
    """The address of a database: MECHA_EXP_MYSQL, or that of a server of MariaDB that runs for the test."""
    pytest.importorskip("pymysql")
    pwd = pytest.importorskip("pwd")
    if url := os.environ.get("MECHA_EXP_MYSQL"):
        storage = storage_of(url)
        if "one" in optuna.get_all_study_names(storage):
            optuna.delete_study(study_name="one", storage=storage)
        storage.engine.dispose()
        yield url
        return
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    install, server = shutil.which("mariadb-install-db", path=path), shutil.which("mariadbd", path=path)
    if install is None or server is None:
        pytest.skip("needs MariaDB's mariadb-install-db and mariadbd")
    data, user = tmp_path / "data", f"--user={pwd.getpwuid(os.geteuid()).pw_name}"
    made = [install, "--no-defaults", f"--datadir={data}", user, "--auth-root-authentication-method=normal"]
    subprocess.run(made, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = [f"--datadir={data}", f"--socket={tmp_path}/socket", "--bind-address=127.0.0.1", f"--port={port}"]
    running = subprocess.Popen([server, "--no-defaults", user, *where], stderr=subprocess.DEVNULL)
    try:
        made_in(port)
        yield f"mysql+pymysql://root@127.0.0.1:{port}/studies"
    finally:
        gc.collect()  # connections that nobody closed say so when their server is gone
        running.kill()
        running.wait()


def made_in(port: int) -> None:
    """Wait for a server, and make the database `studies`."""
    import pymysql

    for _ in range(300):
        try:
            with pymysql.connect(host="127.0.0.1", port=port, user="root") as connection:
                connection.cursor().execute("CREATE DATABASE studies")
                return
        except pymysql.err.OperationalError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


@pytest.mark.heavy
def test_a_study_in_mysql_is_shared_as_in_files(folder, mysql):
    test_two_processes_never_have_the_same_trial_nor_more_than_all(mysql, folder)
    with pytest.raises(
        ConfigError, match=r"it takes the study 'one' for 'ONE'\. Give this search another name"
    ):
        open_shared(mysql, "ONE", SPACE, ["minimize"], {})
    from sqlalchemy import NullPool, create_engine

    first, second = (MySQLLocks(create_engine(mysql, poolclass=NullPool), "two") for _ in range(2))
    first.enter("a")
    assert second.is_alive("a") and not second.is_alive("b")
    timeout = first._session.exec_driver_sql("SELECT @@SESSION.wait_timeout").scalar()
    assert timeout == 2_147_483, "a session that is idle for a night is not a dead process"
    first.leave()
    assert not second.is_alive("a")
    second.leave()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.heavy
@pytest.mark.parametrize("kills", [0, 8])
def test_two_processes_share_a_study_in_mysql(folder, words, mysql, kills):
    shared(folder, mysql, words, kills)


def test_a_single_process_has_the_whole_table_and_goes_on(folder, words, app):
    words = [word for word in words if not word.startswith(("tracking=", "sweep.trials="))]
    first = app(*words, "sweep.trials=4", "sweep.storage=study.log")
    assert first.status == 0, first.err
    assert len(rows(sweep_of(folder))) == 4

    more = app(*words, "sweep.trials=6", "sweep.storage=study.log")

    assert more.status == 0 and "4 of 4 points are there already" in more.out, more.err
    assert len(records(sweep_of(folder))) == 6 and not (sweep_of(folder) / "trials.json").exists()
    numbers = [trial.user_attrs["point"] for trial in optuna.load_study(
        study_name="one", storage=storage_of("study.log")
    ).trials]  # fmt: skip
    assert numbers == list(range(6))


def test_a_process_that_comes_late_reports_nothing_and_the_whole_is_in_another_folder(folder, words, app):
    words = [word for word in words if not word.startswith(("tracking=", "sweep.trials="))]
    words += ["sweep.trials=4", "sweep.storage=study.log"]
    app(*words, "hydra.sweep.dir=x")
    late = app(*words, "hydra.sweep.dir=y")

    assert late.status == 0, late.err
    assert "0 of 4 trials of the study 'one' ran here" in " ".join(late.out.split())
    assert json.loads((folder / "y" / "sweep.json").read_text())["points"] == 0


def test_a_process_is_at_work_until_it_has_reported(folder, words, app, monkeypatch):
    words = [word for word in words if not word.startswith(("tracking=", "sweep.trials="))]
    report, alive = loop.report_chosen, []

    def reported(*arguments):
        study = optuna.load_study(study_name="one", storage=storage_of("study.log"))
        alive.append(FileLocks(Path("study.log")).is_alive(study.user_attrs["mecha_exp_reported"]["worker"]))
        return report(*arguments)

    monkeypatch.setattr(loop, "report_chosen", reported)
    outcome = app(*words, "sweep.trials=3", "sweep.storage=study.log")

    assert outcome.status == 0, outcome.err
    assert alive == [True], "another process that ends meanwhile would report, too"
    assert not list(folder.glob("*study.log.*"))


def test_what_others_ran_is_in_the_table_of_the_last_one(folder, words, app):
    words = [word for word in words if not word.startswith(("tracking=", "sweep.trials="))]
    storage = "sweep.storage=study.log"
    app(*words, "sweep.trials=3", storage, "hydra.sweep.dir=x")
    outcome = app(*words, "sweep.trials=5", storage, "hydra.sweep.dir=y")

    assert outcome.status == 0, outcome.err
    assert len(rows(folder / "y")) == 5
    assert {path.parent.name for path in (folder / "x").glob("*/run.json")} == {"0", "1", "2"}


def test_a_folder_of_a_search_without_storage_is_refused(folder, words, app):
    words = [word for word in words if not word.startswith(("tracking=", "sweep.trials="))]
    app(*words, "sweep.trials=2", "hydra.sweep.dir=x")
    outcome = app(*words, "sweep.trials=2", "hydra.sweep.dir=x", "sweep.storage=study.log")

    assert outcome.status != 0
    assert "has the trials of a search without sweep.storage" in " ".join(outcome.err.split())

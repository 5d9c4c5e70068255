"""What several test files share: models as real files in a temporary folder."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from buckets import bucket, s3_client, s3_server  # noqa: F401
from hypothesis import settings
from outcome import Outcome
from programs import environment
from safetensors.torch import save_file
from state_dicts import StateDict, random_model
from wheels import installed, source, wheel  # noqa: F401

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is not what is tested, and the same commit gives the same examples everywhere.
settings.register_profile("same examples", deadline=None, derandomize=True)
settings.register_profile("new examples", deadline=None)
settings.load_profile(os.environ.get("EXAMPLES", "same") + " examples")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """The level of the log is what it was: the application, run in this process, has a level of its own."""
    before = logging.root.level
    yield
    logging.root.setLevel(before)


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a test and its plugins register is gone after it: another test may take the same names."""
    from mecha_exp.architectures.library import registry as configs
    from mecha_exp.evaluation import registry as evaluators
    from mecha_exp.method_api import registry as methods

    before = set(sys.modules)
    with methods.isolated(), evaluators.isolated(), configs.isolated():
        yield
    for name in sys.modules.keys() - before:
        if name.startswith("mecha_exp_plugin_"):
            del sys.modules[name]


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str, StateDict], str]:
    """Writes a state dict to a safetensors file and returns its path."""

    def write(name: str, tensors: StateDict) -> str:
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path)
        return str(path)

    return write


@pytest.fixture
def models(save: Callable[[str, StateDict], str]) -> Callable[..., list[str]]:
    """Writes that many different `random_model`s and returns their paths."""
    return lambda count, **more: [save(f"model_{i}", random_model(i, **more)) for i in range(count)]


@pytest.fixture(scope="session")
def slurm() -> Iterator[None]:
    """A Slurm of this machine, which its commands find."""
    from slurm_here import slurm_here, why_not

    if reason := why_not():
        pytest.skip(reason)
    with slurm_here() as configuration, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(configuration))
        yield


@pytest.fixture
def postgres() -> Iterator[str]:
    """The address of an empty database on a PostgreSQL of this machine."""
    from postgres_here import postgres_here, why_not

    if reason := why_not():
        pytest.skip(reason)
    with postgres_here() as address:
        yield address


@pytest.fixture
def fresh_ray() -> Iterator[None]:
    """A process that is not connected to Ray, whose workers would know the plugins of earlier tests."""
    ray = pytest.importorskip("ray")
    ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def as_a_user() -> Callable[..., Outcome]:
    """Runs the application in a process of its own."""

    def run(*arguments: str, cwd: Path) -> Outcome:
        variables = {**environment(), "COLUMNS": "100"}
        command = [sys.executable, "-m", "mecha_exp", *arguments]
        done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=180)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def figures() -> None:
    """Sweeps end with all their files. Without it `app` leaves out figures and pages, which take seconds."""


@pytest.fixture
def app(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs the application in this process; tracking and figures are off unless a test asks for them."""
    from composed import composed_once
    from sweep_folders import write_table

    from mecha_exp.cli import main, verbs

    monkeypatch.setattr("hydra.compose", composed_once)
    if "figures" not in request.fixturenames:
        monkeypatch.setattr("mecha_exp.app.sweep.summary.write_all", write_table)

    def run(*arguments: str, tracked: bool = False, cwd: Path | None = None) -> Outcome:
        if cwd is not None:
            monkeypatch.chdir(cwd)
        is_told = any(word.startswith(("tracking", "--version")) for word in arguments)
        untracked = [] if tracked or is_told or (arguments and arguments[0] in verbs()) else ["tracking=none"]
        monkeypatch.setattr(sys, "argv", ["mecha_exp", *arguments, *untracked])
        try:
            status = main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def ray_cluster(free_port: int, plain_interpreter: None) -> Iterator[dict[str, str]]:
    """A cluster of Ray that runs before and after the test's own use of it; its addresses by their kinds."""
    pytest.importorskip("ray")
    from ray_here import ray_here

    with ray_here(free_port) as addresses:
        yield addresses


@pytest.fixture
def plain_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This interpreter by a path without spaces, from which Ray's client cannot start its servers."""
    if " " in sys.executable:
        environment = tmp_path / "environment"
        environment.symlink_to(sys.prefix)
        monkeypatch.setattr(sys, "executable", str(environment / "bin" / Path(sys.executable).name))

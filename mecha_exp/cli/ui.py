"""`python -m mecha_exp ui`: the MLflow dashboard on the local store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import ConfigError, TrackingError
from mecha_exp.paths import tracking_uri
from mecha_exp.terminal.console import print_line, stdout
from mecha_exp.tracking.database import SQLITE, absolute_uri
from mecha_exp.tracking.mlflow_client import last_comparison


def main(arguments: list[str]) -> int:
    """Serve the dashboard until it is interrupted."""
    parser = make_parser(
        "ui",
        "Open the MLflow dashboard of the tracked runs.",
        "example: python -m mecha_exp ui --port 5001",
    )
    parser.add_argument("--uri", default=tracking_uri(), help="the store (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=5000, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.uri.startswith(SQLITE) and not Path(options.uri.removeprefix(SQLITE)).is_file():
        raise ConfigError(
            f"{options.uri} does not exist here: nothing has been tracked in this folder yet. Run a merge "
            "first, or name the store with --uri."
        )
    stdout.print(f"the dashboard is at http://{options.host}:{options.port} (stop it with Ctrl-C)")
    return serve(absolute_uri(options.uri), options.host, options.port)


def serve(uri: str, host: str, port: int) -> int:
    """Run MLflow's own server in a process that ends with this one."""
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    command += ["--host", host, "--port", str(port), "--workers", "1"]
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with (
        subprocess.Popen(command, env={**os.environ, **quiet}, start_new_session=True) as server,
        _interrupted_by_signals(),
    ):
        try:
            _say_where_the_last_sweep_is(uri, f"http://{host}:{port}")
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            _end(server)


def _say_where_the_last_sweep_is(uri: str, address: str) -> None:
    """Print the address at which the points of the last sweep are compared, while the server starts."""
    try:
        comparison = last_comparison(uri)
    except TrackingError:  # the server says what is wrong
        return
    if comparison:
        print_line(f"the last sweep: {address}{comparison}")


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt this program as Ctrl-C does, for the length of a block."""
    names = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(name, signal.default_int_handler) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End a server with the processes that it has started, which a signal to it alone would leave behind."""
    if sys.platform == "win32":
        server.terminate()
        server.wait()
        return
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        if not _lives(server.pid, patience or 0.0):
            break


def _lives(group: int, patience: float) -> bool:
    """Whether a process of a group still lives after so many seconds at most."""
    until = time.monotonic() + patience
    while True:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return False
        if time.monotonic() >= until:
            return True
        time.sleep(0.05)

"""`python -m mecha_exp ui`: the MLflow dashboard on the local store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import ConfigError
from mecha_exp.paths import TRACKING_URI
from mecha_exp.terminal import stdout
from mecha_exp.tracking.database import SQLITE, absolute_uri


def main(arguments: list[str]) -> int:
    """Serve the dashboard until it is interrupted."""
    parser = make_parser(
        "ui",
        "Open the MLflow dashboard of the tracked runs.",
        "example: python -m mecha_exp ui --port 5001",
    )
    parser.add_argument("--uri", default=TRACKING_URI, help="the store (default: %(default)s)")
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
    with subprocess.Popen(command, env={**os.environ, **quiet}) as server:
        try:
            return server.wait()
        except KeyboardInterrupt:
            server.terminate()
            server.wait()
            return 0

"""A server of MLflow on the loopback, which may be killed and started again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


class TrackingServer:
    """A server of MLflow that runs in one process.

    Args:
        folder: of its artifacts and its log.
        database: its address.
        port: on the loopback.

    Attributes:
        uri: its address.
    """

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
        """Start it, and wait until it answers."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # eight processes fewer
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.2)

    def kill(self) -> None:
        """End it at once."""
        os.killpg(self._process.pid, 9)
        self._process.wait()

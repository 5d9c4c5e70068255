"""Workers that are processes of this machine, one for each task; they need no library."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mecha_exp.cluster.task import Outcome, Task, environment_of
from mecha_exp.cluster.workers import LostWorker, Workers

_POLL_SECONDS = 0.02
_CODE = (
    "import pathlib, sys; from mecha_exp.cluster.processes import carry_out; "
    "carry_out(*map(pathlib.Path, sys.argv[1:]))"
)


class ProcessWorkers(Workers):
    """Runs each task in a process of its own, which ends with its sender.

    Args:
        count: how many tasks run at a time.
        cores: of each task.
    """

    def __init__(self, count: int, cores: int = 1) -> None:
        super().__init__(count, cores)
        self._folder = tempfile.TemporaryDirectory(prefix="mecha-tasks-")
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        """Kill the processes that still run."""
        running, self._running, self._waiting = self._running, {}, {}
        for process in running.values():
            process.kill()
            _reap(process)
        self._folder.cleanup()

    def _fill(self) -> None:
        for number, task in self._take(self.count - len(self._running)):
            call, result = self._call(number), self._result(number)
            call.write_bytes(pickle.dumps(task))
            paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._running[number] = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(call), str(result)],
                stdin=subprocess.PIPE,  # which the process reads to learn that this one has ended
                stdout=subprocess.DEVNULL,
                env={**os.environ, **environment_of(self.cores), **paths},
                start_new_session=True,  # so that Ctrl-C interrupts the sender alone, which ends this one
            )

    def _ended(self, seconds: float) -> Iterator[tuple[int, Outcome | LostWorker]]:
        until = time.monotonic() + seconds
        while self._running:
            ended = [number for number, process in self._running.items() if process.poll() is not None]
            outcomes = {number: self._outcome(number) for number in ended}
            self._fill()
            yield from outcomes.items()
            if ended or time.monotonic() >= until:
                return
            time.sleep(_POLL_SECONDS)

    def _outcome(self, number: int) -> Outcome | LostWorker:
        process = self._running.pop(number)
        _reap(process)
        try:
            outcome: Outcome = pickle.loads(self._result(number).read_bytes())
        except OSError:
            return LostWorker(f"process {process.pid} ended with status {process.returncode} and no result")
        return outcome

    def _call(self, number: int) -> Path:
        return Path(self._folder.name, f"{number}.call")

    def _result(self, number: int) -> Path:
        return Path(self._folder.name, f"{number}.result")


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _end_with_the_sender() -> None:
    """End this process when the one that started it has ended: its end of the pipe is closed then."""
    sys.stdin.buffer.read()
    os._exit(1)


def carry_out(call: Path, result: Path) -> None:
    """Carry out a pickled task in this process, write its outcome to a file, and end."""
    threading.Thread(target=_end_with_the_sender, daemon=True).start()
    task: Task = pickle.loads(call.read_bytes())
    new = result.with_suffix(".new")
    new.write_bytes(pickle.dumps(task()))
    new.replace(result)  # complete, or not there
    os._exit(0)  # the thread reads for ever, and the interpreter would wait for it

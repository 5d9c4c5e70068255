"""Workers that are processes of this machine, and take one task after the other; they need no library."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

from mecha_exp.cluster.task import Outcome, Task, environment_of
from mecha_exp.cluster.workers import LostWorker, Workers
from mecha_exp.system.cores import available_cores

TASKS = "mecha-tasks-"
"""How the names of the temporary folders of calls begin; the number of the sender follows."""
_POLL_SECONDS = 0.02
_START_SECONDS = 2.0
"""What a process takes to import its modules, about: as many as there are cores start at a time."""
_CODE = "import sys; from mecha_exp.cluster.processes import carry_out; carry_out(sys.argv[1])"


class ProcessWorkers(Workers):
    """Runs tasks in processes, which end with their sender.

    Args:
        count: how many tasks run at a time.
        cores: of each task.
        log: takes what the processes say; None is where this process says it.
    """

    def __init__(self, count: int, cores: int = 1, log: Path | None = None) -> None:
        super().__init__(count, cores)
        self._folder = tempfile.TemporaryDirectory(prefix=f"{TASKS}{os.getpid()}-")
        self._log = log
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._idle: list[subprocess.Popen[bytes]] = []
        self._starts: list[float] = []

    def close(self) -> None:
        """Kill the processes."""
        processes = [*self._running.values(), *self._idle]
        self._running, self._idle, self._waiting = {}, [], {}
        for process in processes:
            process.kill()
        for process in processes:
            _reap(process)
        self._folder.cleanup()

    def _fill(self) -> None:
        for process in [process for process in self._idle if process.poll() is not None]:
            self._idle.remove(process)
            _reap(process)
        free = min(self.count - len(self._running), len(self._idle) + self._places_to_start())
        for number, task in self._take(free):
            self._file(number, "call").write_bytes(pickle.dumps(task))
            process = self._running[number] = self._idle.pop() if self._idle else self._started_process()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is killed just now, so that its task is lost
                process.stdin.write(f"{number}\n".encode())
                process.stdin.flush()

    def _places_to_start(self) -> int:
        """How many processes may start now; each that starts beside others delays the imports of all."""
        began = time.monotonic() - _START_SECONDS
        self._starts = [start for start in self._starts if start > began]
        return max(0, available_cores() - len(self._starts))

    def _started_process(self) -> subprocess.Popen[bytes]:
        self._starts.append(time.monotonic())
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with contextlib.ExitStack() as stack:
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
            return subprocess.Popen(
                [sys.executable, "-c", _CODE, self._folder.name],
                stdin=subprocess.PIPE,  # tells it the numbers of its tasks, and that this one has ended
                stdout=subprocess.DEVNULL,
                stderr=None if self._log is None else stack.enter_context(self._log.open("ab")),
                env={**os.environ, **environment_of(self.cores), **paths},
                start_new_session=True,  # so that Ctrl-C interrupts the sender alone, which ends this one
            )

    def _ended(self, seconds: float) -> Iterator[tuple[int, Outcome | LostWorker]]:
        until = time.monotonic() + seconds
        while self._running or self._waiting:
            outcomes = {n: outcome for n in list(self._running) if (outcome := self._outcome(n))}
            self._fill()
            yield from outcomes.items()
            if outcomes or time.monotonic() >= until:
                return
            time.sleep(_POLL_SECONDS)

    def _outcome(self, number: int) -> Outcome | LostWorker | None:
        """The outcome of a task; None while it runs."""
        process = self._running[number]
        has_ended = process.poll() is not None  # asked first: it may end after its result is there
        try:
            outcome: Outcome = pickle.loads(self._file(number, "result").read_bytes())
        except FileNotFoundError:
            if not has_ended:
                return None
        else:
            self._idle.append(self._running.pop(number))
            return outcome
        _reap(self._running.pop(number))
        where = "" if self._log is None else f". Its log: {self._log}"
        status = process.returncode
        return LostWorker(f"process {process.pid} ended with status {status} and no result{where}")

    def _file(self, number: int, suffix: str) -> Path:
        return Path(self._folder.name, f"{number}.{suffix}")


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def carry_out(folder: str) -> None:
    """Carry out the pickled tasks whose numbers come by standard input, until that is closed.

    Args:
        folder: where `NUMBER.call` has a task, and `NUMBER.result` gets its outcome.
    """
    numbers: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_receive, args=(numbers,), daemon=True).start()
    while True:
        number = numbers.get()
        task: Task = pickle.loads(Path(folder, f"{number}.call").read_bytes())
        new = Path(folder, f"{number}.new")
        new.write_bytes(pickle.dumps(task()))
        new.replace(new.with_suffix(".result"))  # complete, or not there


def _receive(numbers: SimpleQueue[str]) -> None:
    """Receive numbers, and end this process when its sender has ended."""
    for line in sys.stdin.buffer:
        numbers.put(line.decode().strip())
    os._exit(1)

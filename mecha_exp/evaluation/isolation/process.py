"""Run evaluators in a separate process, so that one that hangs can be killed.

A thread cannot be stopped from outside, and a signal handler waits for native code to return: only a
process can be ended at any time. One process measures many models; after a timeout the next model gets a new
process. It is started afresh rather than forked, since threads and CUDA do not survive a fork. A model in
memory is mapped by it, and a model in a file is opened by its path: no tensor goes through a pipe.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation.isolation.request import Request
from mecha_exp.evaluation.isolation.shared_model import shared
from mecha_exp.evaluation.measurement import Measurement

START_SECONDS = 600.0
"""How long a process may take to import what evaluators need: libraries on network folders take minutes."""


class LostProcessError(EvaluationError):
    """An evaluator that hung or ended its process; another attempt may succeed."""

    @classmethod
    def of_time(cls, request: Request) -> LostProcessError:
        """The error of an evaluator that was ended when its time was over."""
        return cls(
            f"the evaluator '{request.evaluator}' was not done after {request.timeout:g} s and was ended. "
            "Give it more time with evaluator.timeout."
        )

    @classmethod
    def of_end(cls, request: Request, how: str) -> LostProcessError:
        """The error of an evaluator whose process has ended."""
        name = request.evaluator
        return cls(f"the evaluator '{name}' ended its process ({how}): it crashed, or memory ran out.")


@functools.cache
def evaluation_process(plugins: Sequence[str]) -> EvaluationProcess:
    """The process that evaluates with these plugins; started by the first evaluation."""
    process = EvaluationProcess(plugins)
    atexit.register(process.close)
    return process


class EvaluationProcess:
    """A process that measures models one after another, each within a time limit.

    Args:
        plugins: the files that define its evaluators.
        environment: variables of its environment beside those of this process.
    """

    def __init__(self, plugins: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._plugins = list(plugins)
        self._environment = dict(environment or {})
        self._running: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def begin(self) -> None:
        """Start the process unless it is there, and do not wait until it has imported everything."""
        if self._running is not None and (not self._is_ready or self._running.poll() is None):
            return
        path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
        self._is_ready = False
        self._running = subprocess.Popen(
            [sys.executable, "-m", "mecha_exp.evaluation.isolation.worker", *self._plugins],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self._environment, "PYTHONPATH": path},
            start_new_session=True,  # a group of processes, which are ended together
        )

    def score(self, request: Request) -> Measurement:
        """Measure a model by an evaluator; returns its numbers by name, and its outcomes.

        Raises:
            LostProcessError: the evaluator exceeded its time, or its process has ended.
            EvaluationError: the evaluator raised, or did not return numbers.
        """
        process, model, context = self._started(), request.model, request.context
        assert process.stdin is not None and process.stdout is not None
        expired = threading.Event()
        file = nullcontext(model.absolute()) if isinstance(model, Path) else shared(model)
        try:
            with file as model_there, _time_limit(process, request.timeout, expired):
                pickle.dump((*request.arguments, model_there), process.stdin)
                process.stdin.flush()
                while (answer := pickle.load(process.stdout))[0] == "progress":
                    if context and context.report:
                        context.report(*answer[1])
                kind, result = answer
        except (EOFError, OSError, pickle.UnpicklingError):
            status = self.close()
            if expired.is_set():
                raise LostProcessError.of_time(request) from None
            raise LostProcessError.of_end(request, f"status {status}") from None
        except BaseException:  # such as Ctrl-C: no caller will read the answer
            self.close()
            raise
        if kind == "error":
            raise EvaluationError(result)
        assert isinstance(result, Measurement)
        return result

    def interrupt(self) -> None:
        """End the process in the middle of a measurement of another thread, which raises."""
        if (process := self._running) is not None:
            _kill(process)

    def close(self) -> int | None:
        """End the process; returns its exit status."""
        process, self._running = self._running, None
        if process is None:
            return None
        _kill(process)
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close() if pipe else None
        return process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, ready for a model; starts it unless it is running."""
        self.begin()
        process = self._running
        assert process is not None and process.stdout is not None
        if not self._is_ready:
            expired = threading.Event()
            try:
                with _time_limit(process, START_SECONDS, expired):
                    pickle.load(process.stdout)  # sent when everything is imported
            except EOFError:
                self.close()
                how = (
                    f"was not ready after {START_SECONDS:g} s" if expired.is_set() else "could not be started"
                )
                raise EvaluationError(f"the process for evaluators {how}: see above.") from None
            self._is_ready = True
        return process


@contextmanager
def _time_limit(
    process: subprocess.Popen[bytes], timeout: float | None, expired: threading.Event
) -> Iterator[None]:
    """Kill a process unless the block ends within a time; `expired` tells that it was killed."""
    if timeout is None:
        yield
        return

    def end() -> None:
        expired.set()
        _kill(process)

    timer = threading.Timer(timeout, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started, which would keep its pipe open."""
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

"""Run evaluators in a separate process, so that one that hangs can be killed.

A thread cannot be stopped from outside, and a signal handler waits for native code to return: only a
process can be ended at any time. One process measures many models; after a timeout the next model gets a new
process. It is started afresh rather than forked, since threads and CUDA do not survive a fork. A model in
memory is written to a pipe tensor by tensor: unlike shared memory a pipe has no limit that a container sets,
and no copy of the whole model is pickled. A model in a file is opened by its path.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from mecha_exp.checkpoint import dtype_name, torch_dtype
from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.measurement import Measurement

if TYPE_CHECKING:
    from mecha_exp.evaluation.scoring import Evaluation


@functools.cache
def evaluation_process(plugins: Sequence[str]) -> EvaluationProcess:
    """The process that evaluates with these plugins; started by the first evaluation."""
    process = EvaluationProcess(plugins)
    atexit.register(process.close)
    return process


class EvaluationProcess:
    """A process that measures models one after another, each within a time limit."""

    def __init__(self, plugins: Sequence[str]) -> None:
        self._plugins = list(plugins)
        self._running: subprocess.Popen[bytes] | None = None

    def score(
        self,
        evaluation: Evaluation,
        model: Path | Mapping[str, Tensor],
        timeout: float,
        context: Context | None = None,
    ) -> Measurement:
        """Measure a model by an evaluator; returns its numbers by name, and its outcomes.

        Raises:
            EvaluationError: the evaluator raised, did not return numbers, or exceeded `timeout` seconds.
        """
        name = evaluation.evaluator.name
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        expired = threading.Event()

        def end() -> None:
            expired.set()
            _kill(process)

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            send_request(process.stdin, name, dict(evaluation.parameters), model, context)
            kind, result = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            status = self.close()
            if expired.is_set():
                raise EvaluationError(
                    f"the evaluator '{name}' was not done after {timeout:g} s and was ended. Give it more "
                    "time with evaluator.timeout."
                ) from None
            raise EvaluationError(
                f"the evaluator '{name}' ended its process (status {status}): it crashed, or memory ran out."
            ) from None
        except BaseException:  # such as Ctrl-C: no caller will read the answer
            self.close()
            raise
        finally:
            timer.cancel()
        if kind == "error":
            raise EvaluationError(result)
        assert isinstance(result, Measurement)
        return result

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
        """Start the process unless it is running; returns it ready for a model."""
        if self._running is not None and self._running.poll() is None:
            return self._running
        path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
        self._running = subprocess.Popen(
            [sys.executable, "-m", "mecha_exp.evaluation.worker", *self._plugins],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a group of processes, which are ended together
        )
        assert self._running.stdout is not None
        try:
            pickle.load(self._running.stdout)  # sent when everything is imported
        except EOFError:
            self.close()
            raise EvaluationError("the process for evaluators could not be started: see above.") from None
        return self._running


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started, which would keep its pipe open."""
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def send_request(
    pipe: IO[bytes],
    name: str,
    parameters: dict[str, Any],
    model: Path | Mapping[str, Tensor],
    context: Context | None = None,
) -> None:
    """Write an evaluator's name, its parameters, a context, and a model: a path, or headers and bytes."""
    if isinstance(model, Path):
        pickle.dump((name, parameters, context, str(model.absolute()), []), pipe)
    else:
        tensors = [tensor.detach().cpu().contiguous() for tensor in model.values()]
        headers = [(k, dtype_name(t.dtype), tuple(t.shape)) for k, t in zip(model, tensors, strict=True)]
        pickle.dump((name, parameters, context, None, headers), pipe)
        for tensor in tensors:
            pipe.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    pipe.flush()


def receive_request(
    pipe: IO[bytes],
) -> tuple[str, dict[str, Any], Context | None, Path | dict[str, Tensor]]:
    """Read what `send_request` wrote.

    Raises:
        EOFError: the other process closed the pipe.
    """
    name, parameters, context, path, headers = pickle.load(pipe)
    if path is not None:
        return name, parameters, context, Path(path)
    model = {}
    for key, dtype, shape in headers:
        tensor = torch.empty(shape, dtype=torch_dtype(dtype))
        view = tensor.view(-1).view(torch.uint8).numpy().data
        while len(view):
            count = pipe.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise EOFError
            view = view[count:]
        model[key] = tensor
    return name, parameters, context, model

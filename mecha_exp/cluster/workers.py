"""What all kinds of workers have in common: tasks are started, and end in any order."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mecha_exp.cluster.task import Outcome, Task
from mecha_exp.errors import ClusterError, ConfigError

POLL_SECONDS = 1.0


class LostWorker(ClusterError):
    """A worker that ended before its task did: killed, out of memory or time, or with its machine."""


class Workers(ABC):
    """Runs tasks, at most `count` at a time; leaving it as a context ends those that still run.

    Functions and arguments are pickled, so functions are those of modules. Tasks run in the current folder of
    their sender, on `cores` cores each.
    """

    def __init__(self, count: int, cores: int = 1) -> None:
        self.count, self.cores = count, cores
        self._started = 0
        self._waiting: dict[int, Task] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> range:
        """Start a task for each tuple of arguments, on Slurm as one array job; returns their numbers."""
        numbers = range(self._started, self._started + len(arguments))
        self._started = numbers.stop
        tasks = (Task.of(function, values, self.cores) for values in arguments)
        self._waiting |= zip(numbers, tasks, strict=True)
        self._fill()
        return numbers

    def ended(self, seconds: float = POLL_SECONDS) -> Iterator[tuple[int, Any | Exception]]:
        """Wait at most so long, and yield the tasks that have ended since the last call, each once.

        Yields:
            the number of a task, and what it returned, or the error that it raised, or `LostWorker`.
        """
        for number, outcome in self._ended(seconds):
            if isinstance(outcome, LostWorker):
                yield number, outcome
            else:
                value, error = outcome
                yield number, value if error is None else error

    def run(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]], retries: int = 2
    ) -> Iterator[tuple[int, Any | Exception]]:
        """Run a task for each tuple of arguments, and yield the results in the order in which tasks end.

        Args:
            function: of a module.
            arguments: of each call.
            retries: how often a task is started again whose worker was lost.

        Yields:
            the index of the arguments, and what the function returned, or the error that it raised, or
            `LostWorker` if it was lost once more than there are retries.
        """
        running = dict(zip(self.start(function, arguments), range(len(arguments)), strict=True))
        lost = dict.fromkeys(range(len(arguments)), 0)
        while running:
            for number, result in self.ended():
                index = running.pop(number)
                lost[index] += isinstance(result, LostWorker)
                if isinstance(result, LostWorker) and lost[index] <= retries:
                    running[self.start(function, [arguments[index]])[0]] = index
                else:
                    yield index, result

    @abstractmethod
    def close(self) -> None:
        """End the tasks that still run, and the workers that were started here. Idempotent."""

    def _take(self, count: int) -> list[tuple[int, Task]]:
        """Take the next waiting tasks with their numbers, `count` at most."""
        numbers = list(self._waiting)[: max(0, count)]
        return [(number, self._waiting.pop(number)) for number in numbers]

    @abstractmethod
    def _fill(self) -> None:
        """Start waiting tasks while workers are free; called after tasks have been added."""

    @abstractmethod
    def _ended(self, seconds: float) -> Iterator[tuple[int, Outcome | LostWorker]]:
        """The outcomes of tasks that have ended since the last call, after at most so many seconds."""


def require(name: str, what: str) -> Any:
    """The library of a kind of workers.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} needs {error.name}, which is not installed: pip install 'mecha_exp[launchers]'."
        ) from None

"""A function call as a worker receives it: with the folder, module paths and variables of its sender."""

from __future__ import annotations

import os
import pickle
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mecha_exp.errors import ClusterError
from mecha_exp.system.cache import MODELS_SIZE_VARIABLE, MODELS_VARIABLE
from mecha_exp.system.cores import CORES

Outcome = tuple[Any, Exception | None]
"""What a task returned, or else what it raised."""


@dataclass(frozen=True)
class Task:
    """A call of a function of a module, to be carried out by a worker in the sender's surroundings.

    The call stays pickled until the folder and the paths are set: its modules may lie there.

    Attributes:
        call: the pickled function and arguments.
        folder: the current folder of the sender, which the worker must see, too.
        paths: where the sender finds modules.
        environment: variables that are set before the modules are imported.
    """

    call: bytes
    folder: str
    paths: tuple[str, ...]
    environment: Mapping[str, str]

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Sequence[Any], cores: int) -> Task:
        """The call of a function with arguments, on so many cores."""
        call = pickle.dumps((function, tuple(arguments)))
        return cls(call, str(Path.cwd()), tuple(sys.path), environment_of(cores))

    def __call__(self, *more: Any) -> Outcome:
        """Make the call, with more arguments. What it raises is returned: not all clusters carry errors."""
        os.environ.update(self.environment)
        sys.path += [path for path in self.paths if path not in sys.path]
        try:
            self._enter_folder()
            function, arguments = pickle.loads(self.call)
            return function(*arguments, *more), None
        except Exception as error:
            return None, _portable(error)

    def _enter_folder(self) -> None:
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise ClusterError(
                f"the worker on {platform.node()} does not see the folder {self.folder} ({error.strerror}). "
                "Start the command in a folder that all machines of the cluster share."
            ) from None


def environment_of(cores: int) -> dict[str, str]:
    """The variables by which a process uses so many cores, and is like this one.

    It finds the modules that this one finds, and keeps what it reads of remote models where this one does.
    """
    threads = dict.fromkeys((CORES, "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(cores))
    kept = {name: os.environ[name] for name in (MODELS_VARIABLE, MODELS_SIZE_VARIABLE) if name in os.environ}
    return threads | kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for the processes that are started in the block."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _portable(error: Exception) -> Exception:
    """An error that can be pickled and read again: itself, or else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ClusterError(f"{type(error).__name__}: {error}")
    return error

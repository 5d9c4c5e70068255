"""A plugin for the tests of merges by many: methods whose process is killed in the middle."""

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from mecha_exp import Parameter, Return, merge_method

KEYS_BEFORE_DEATH = 4

_calls = 0  # of this process


@merge_method
def deadly_mean(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):
    """(a + b) / 2, and the first process at its fourth key is killed where a folder waits for that."""
    global _calls
    graves = Path("graves")
    if graves.exists():
        _calls += 1
        if _calls == KEYS_BEFORE_DEATH and bury(graves / "first"):
            os.kill(os.getpid(), signal.SIGKILL)
    return (a + b) / 2


def bury(grave: Path) -> bool:
    """Whether this process is the one that made a folder, which only one can."""
    try:
        grave.mkdir()
    except FileExistsError:
        return False
    return True


@merge_method
def slow_mean(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):
    """(a + b) / 2, so slowly that a merge can be killed in the middle."""
    time.sleep(float(os.environ.get("SLOW_SECONDS", "0")))
    return (a + b) / 2

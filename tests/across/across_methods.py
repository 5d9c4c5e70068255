"""A plugin for the tests of merges by many: methods whose process is killed in the middle."""

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from mecha_exp import Parameter, Return, merge_method

KEYS_BEFORE_DEATH = 6


@merge_method
def deadly_mean(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):
    """(a + b) / 2, and the first process that calls it often is killed where a file says so."""
    calls = Path("calls")
    if calls.exists():
        calls.write_text(calls.read_text() + "x")
        if len(calls.read_text()) == KEYS_BEFORE_DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
    return (a + b) / 2


@merge_method
def slow_mean(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):
    """(a + b) / 2, so slowly that a merge can be killed in the middle."""
    time.sleep(0.2)
    return (a + b) / 2

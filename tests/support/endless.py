"""Merges with a method that stays in its N-th call until it is stopped; a program of its own.

python endless.py N A B TARGET          through the library
python endless.py N app ARGUMENT...     through the command line
"""

from __future__ import annotations

import os
import signal
import sys
import time

from torch import Tensor

from mecha_exp import EngineOptions, Parameter, Return, merge, merge_method

calls_left = int(sys.argv[1])


@merge_method
def endless(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):  # type: ignore[valid-type]
    """a, or nothing at all."""
    global calls_left
    calls_left -= 1
    if calls_left == 0:
        print("begun", flush=True)  # noqa: T201
        time.sleep(60)
    return a


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background of some shells
    if sys.argv[2] == "app":
        from mecha_exp.cli import main

        sys.argv[1:] = sys.argv[3:]
        sys.exit(main())
    try:
        merge(endless(sys.argv[2], sys.argv[3]), sys.argv[4], EngineOptions(workers=1))
    except KeyboardInterrupt:
        os._exit(130)  # an ordinary exit waits for the method

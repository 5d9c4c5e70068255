"""Ends a tracked sweep at its n-th call that changes files, for some n; a program of its own, for `fork`.

    python sweep_crash_points.py FOLDER FAULT COUNT ARGUMENT...

runs the command once undisturbed in FOLDER/undisturbed. For COUNT of its calls, spread over all of them, it
then runs it in FOLDER/n with the fault, and once more to its end: with FAULT=kill the process is gone at the
n-th call, with FAULT=full the disk has no room from then on.
Prints the list of these n as JSON. Figures are left out, as they have nothing to do with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import sweep_killing
from crash_points import GONE, Fault

from mecha_exp.method_api.registry import all_methods


def calls_of(folder: Path, kind: str, at: int, arguments: Sequence[str]) -> int | None:
    """Run the command in a child, with a fault at its n-th call or without (0); returns its number of calls.

    None if the child did not come to its end.
    """
    folder.mkdir(exist_ok=True)
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        fault = Fault(folder, kind if at else "none", at)
        os.chdir(folder)
        status = sweep_killing.run(folder, arguments)
        fault._kind = "none"
        os.write(sending, b"%d" % fault.calls)
        os._exit(status)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (folder / "status.txt").open("a").write(f"{status}\n")
    if status not in ((0, GONE, 1) if at else (0,)):
        sys.exit(f"the sweep in {folder} failed at {at}: {(folder / 'output.txt').read_text()[-2000:]}")
    return int(answer) if status == 0 else None


def main(folder: Path, kind: str, count: int, arguments: Sequence[str]) -> None:
    all_methods()
    calls = calls_of(folder / "undisturbed", kind, 0, arguments)
    assert calls
    first = 2  # the one before opens the file for the output
    chosen = sorted({first + i * (calls - first) // (count - 1) for i in range(count)})
    for at in chosen:
        calls_of(folder / str(at), kind, at, arguments)
        calls_of(folder / str(at), kind, 0, arguments)
    print(json.dumps(chosen))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])

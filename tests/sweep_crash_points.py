"""Ends a tracked sweep at its n-th call that changes files, for some n; a program of its own, for `fork`.

    python sweep_crash_points.py FOLDER COUNT ARGUMENT...

runs the command once undisturbed in FOLDER/undisturbed. For COUNT of its calls, spread over all of them, it
then runs it in FOLDER/n until the process is gone at the n-th call, and once more to its end.
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


def calls_of(folder: Path, at: int, arguments: Sequence[str]) -> int | None:
    """Run the command in a child that ends at its n-th call (0: never); returns the calls, None if it did."""
    folder.mkdir(exist_ok=True)
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        fault = Fault(folder, "kill" if at else "none", at)
        os.chdir(folder)
        status = sweep_killing.run(folder, arguments)
        os.write(sending, b"%d" % fault.calls)
        os._exit(status)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, GONE if at else 0):
        sys.exit(f"the sweep in {folder} failed at {at}: {(folder / 'output.txt').read_text()[-2000:]}")
    return int(answer) if status == 0 else None


def main(folder: Path, count: int, arguments: Sequence[str]) -> None:
    all_methods()
    calls = calls_of(folder / "undisturbed", 0, arguments)
    assert calls
    chosen = sorted({1 + i * (calls - 1) // (count - 1) for i in range(count)})
    for at in chosen:
        calls_of(folder / str(at), at, arguments)
        calls_of(folder / str(at), 0, arguments)
    print(json.dumps(chosen))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

"""Starts a sweep again and again and kills it with SIGKILL at random moments; a program, for `fork`.

    python sweep_killing.py FOLDER SEED KILLS ARGUMENT...

runs the command once undisturbed in FOLDER/undisturbed, and in FOLDER/disturbed with so many kills, then to
its end. What is slow and has nothing to do with it, imports and figures, is done once or not at all.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sweep_folders import write_table

from mecha_exp import cli
from mecha_exp.app.sweep import summary


def start(folder: Path, arguments: Sequence[str]) -> int:
    """Start the command in a process of its own; returns its id."""
    child = os.fork()
    if not child:
        os._exit(run(folder, arguments))
    return child


def run(folder: Path, arguments: Sequence[str]) -> int:
    """Run the command in this process, and its words into a file; returns its status."""
    os.chdir(folder)
    silence = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sys.argv = ["mecha_exp", *arguments]
    summary.write_all = write_table  # type: ignore[attr-defined]
    return cli.main()


def finish(process: int) -> None:
    """Wait for a start that is to succeed."""
    _, status = os.waitpid(process, 0)
    if os.waitstatus_to_exitcode(status):
        sys.exit("the sweep failed")


def main(folder: Path, seed: int, kills: int, arguments: Sequence[str]) -> None:
    chance = random.Random(seed)
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    for place in (undisturbed, disturbed):
        place.mkdir()
    began = time.monotonic()
    finish(start(undisturbed, arguments))
    seconds = time.monotonic() - began
    for number in range(kills):  # early ones and late ones: each goes on where the last one came to
        process = start(disturbed, arguments)
        time.sleep(chance.uniform(0.1, 0.9) * seconds * (0.3 + number / kills))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    finish(start(disturbed, arguments))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])

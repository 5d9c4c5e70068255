"""Starts one search in several folders at once, and kills its processes at random; a program, for `fork`.

    python search_sharing.py FOLDER SEED KILLS PROCESSES ARGUMENT...

runs the command in FOLDER/0, FOLDER/1, ... side by side. Each kill ends one of them with SIGKILL, and it is
started again. In the end all of them run to their end.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sweep_killing import finish, start


def main(folder: Path, seed: int, kills: int, processes: int, arguments: Sequence[str]) -> None:
    chance = random.Random(seed)
    folders = [folder / str(number) for number in range(processes)]
    for place in folders:
        place.mkdir(exist_ok=True)
    running = [start(place, arguments) for place in folders]
    for _ in range(kills):
        time.sleep(chance.uniform(0.05, 0.8))
        number = chance.randrange(processes)
        os.kill(running[number], signal.SIGKILL)
        os.waitpid(running[number], 0)
        running[number] = start(folders[number], arguments)
    for process in running:
        finish(process)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])

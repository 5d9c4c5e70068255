"""Kills merges with SIGKILL at random moments and says what they left; a program of its own, for `fork`.

    python killing.py FOLDER SEED KILLS

FOLDER holds `a.safetensors` and `b.safetensors`, and `target.safetensors`, which every merge replaces. Prints
as JSON what an undisturbed merge gives and, of each start, how many keys were finished before and after, how
many were resumed where it came to its end, and which file was at the target.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from written import digest

from mecha_exp import EngineOptions, Job, Parameter, Return, merge_many, merge_method
from mecha_exp.checkpoint.transaction import journal
from mecha_exp.checkpoint.transaction.paths import JOURNAL, sibling
from mecha_exp.method_api.registry import all_methods

SECONDS_A_KEY = 0.003


@merge_method
def slow_sum(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):  # type: ignore[valid-type]
    """a + 0.3 b, so slowly that a merge can be killed in the middle."""
    time.sleep(SECONDS_A_KEY)
    return a + 0.3 * b


def slow_merge(folder: Path, target: Path) -> int:
    """Make the target; returns the number of resumed keys."""
    recipe = slow_sum(str(folder / "a.safetensors"), str(folder / "b.safetensors"))
    job = Job(recipe, target, metadata={"format": "pt"}, durable=False)
    return merge_many([job], EngineOptions(workers=2)).resumed_keys


def finished_keys(target: Path) -> int:
    """How many keys the journal beside the target lists."""
    path = sibling(target, JOURNAL)
    return sum(type(line) is list for line in journal._lines(path.read_bytes())) - 1 if path.exists() else 0


def main(folder: Path, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    target = folder / "target.safetensors"
    old = target.read_bytes()
    undisturbed = folder / "undisturbed.safetensors"
    all_methods()  # imported once, and not after every start
    started = time.perf_counter()
    start(folder, undisturbed, 60)
    took = time.perf_counter() - started
    starts = []
    while sum(start["resumed"] is None for start in starts) < kills:
        before = finished_keys(target)
        resumed = start(folder, target, chance.uniform(0, took))
        found = {"before": before, "after": finished_keys(target), "resumed": resumed}
        starts.append({**found, "target": digest(target)})
        if resumed is not None:
            target.write_bytes(old)
    print(json.dumps({"undisturbed": digest(undisturbed), "starts": starts}))  # noqa: T201


def start(folder: Path, target: Path, seconds: float) -> int | None:
    """Merge in a process of its own for so long; returns the resumed keys, or None where it was killed."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        os.write(sending, b"%d" % slow_merge(folder, target))
        os._exit(0)
    os.close(sending)
    select.select([receiving], [], [], seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    resumed = os.read(receiving, 20)
    os.close(receiving)
    return int(resumed) if resumed else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""Ends merges in the middle of a key's bytes, by a limit to the size of files; a program, for `fork`.

    python killing_in_keys.py FOLDER

FOLDER holds `a.safetensors` and `b.safetensors`, and `target.safetensors`, which every merge replaces. The
kernel ends the process at the write that crosses the limit, in Python and in compiled loops alike.
Prints as JSON, for each method and way of running it, the hash of what an undisturbed merge gives and, for
each limit, the signal that ended the merge, then how many keys the same merge resumed, and the hashes of the
target before and after it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from written import digest

import mecha_exp
from mecha_exp import EngineOptions, Job, merge_many
from mecha_exp.checkpoint.safetensors import writer
from mecha_exp.method_api.registry import all_methods

SHARES = (0.1, 0.5, 0.9)
"""Where the file is cut off, as a share of its bytes."""

METHODS = {
    "weighted_sum": lambda a, b: mecha_exp.weighted_sum(a, b, alpha=0.3),
    "ties": lambda a, b: mecha_exp.add_difference_ties(a, b, k=0.3),
}
"""One that streams, and one that needs a reduction of each key before."""


def merge_in_tiles(folder: Path, target: Path, method: str, fuse: str) -> int:
    """Make the target, whose keys are written in many tiles; returns the number of resumed keys."""
    recipe = METHODS[method](str(folder / "a.safetensors"), str(folder / "b.safetensors"))
    options = EngineOptions(workers=1, tile_size=512, fuse=fuse)
    return merge_many([Job(recipe, target, metadata={"format": "pt"})], options).resumed_keys


def limit_files(share: float) -> None:
    """End the process at its first write beyond that share of the file that is then being written."""
    allocate = writer.preallocate

    def allocate_then_limit(file: Any, size: int) -> None:
        allocate(file, size)
        most = int(size * share)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    writer.preallocate = allocate_then_limit


def end_in_a_key(folder: Path, target: Path, share: float, method: str, fuse: str) -> int:
    """Merge in a child that is ended at a share of the file; returns the signal."""
    child = os.fork()
    if not child:
        limit_files(share)
        merge_in_tiles(folder, target, method, fuse)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def ends_of(folder: Path, method: str, fuse: str) -> dict[str, Any]:
    """What became of the target for each limit."""
    target, undisturbed = folder / "target.safetensors", folder / "undisturbed.safetensors"
    old, ends = target.read_bytes(), []
    merge_in_tiles(folder, undisturbed, method, fuse)
    for share in SHARES:
        number = end_in_a_key(folder, target, share, method, fuse)
        before = digest(target)
        resumed = merge_in_tiles(folder, target, method, fuse)
        ends.append({"signal": number, "before": before, "resumed": resumed, "after": digest(target)})
        target.write_bytes(old)
    return {"undisturbed": digest(undisturbed), "ends": ends}


def main(folder: Path) -> None:
    all_methods()
    cases = [(method, fuse) for method in METHODS for fuse in ("always", "never")]
    print(json.dumps({" ".join(case): ends_of(folder, *case) for case in cases}))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))

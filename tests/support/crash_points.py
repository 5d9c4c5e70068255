"""Ends a process at its n-th call that changes files, for every n; a program of its own, for `fork`.

    python crash_points.py SCENARIO FOLDER FAULT COUNT

runs the work of a scenario in FOLDER once undisturbed, and then again for COUNT of its calls (0: for every
one): with FAULT=kill the process is gone before the call is made, with FAULT=full the call and all that ask
for room after it find no room on the disk.
Prints as JSON what each of these starts left, and what the same work gives after it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

GONE = 77
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = {f"os.{x}" for x in ("rename", "remove", "mkdir", "rmdir", "link", "symlink", "truncate", "chmod")}
NOT_AUDITED = ("pwrite", "ftruncate", "posix_fallocate", "fsync", "fdatasync")
ASKS_FOR_ROOM = {"open", "os.mkdir", "os.link", *NOT_AUDITED}


class Fault:
    """Counts the calls that change files below a folder, and fails from the `at`-th on."""

    def __init__(self, folder: Path, kind: str, at: int) -> None:
        self.calls, self._kind, self._at = 0, kind, at
        self._folder = str(folder)
        sys.addaudithook(self._audited)
        for name in NOT_AUDITED:
            setattr(os, name, self._counted(name, getattr(os, name)))
        from mecha_exp.checkpoint.safetensors import writer
        from mecha_exp.checkpoint.transaction import staging

        writer._flush_data = os.fdatasync
        staging._exchange = self._counted("exchange", staging._exchange)

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, str | bytes) or not flags & WRITES:
                return
        elif event not in CHANGES:
            return
        else:
            path = arguments[0]
        if isinstance(path, str | bytes | Path) and self._folder in str(Path(os.fsdecode(path)).absolute()):
            self._call(event)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            self._call(name)
            return function(*arguments, **named)

        return call

    def _call(self, event: str) -> None:
        self.calls += 1
        if self._kind == "kill" and self.calls == self._at:
            os._exit(GONE)
        if self._kind == "full" and self.calls >= self._at > 0 and event in ASKS_FOR_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_child(work: Callable[[], None], folder: Path, kind: str, at: int) -> tuple[int, int, str]:
    """Do the work in a child; returns its exit status, the number of calls, and what went wrong."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        fault = Fault(folder, kind, at)
        status, error = 0, ""
        try:
            work()
        except Exception as problem:
            status, error = 1, f"{type(problem).__name__}: {problem}"
        fault._kind = "none"
        os.write(sending, json.dumps([status, fault.calls, error]).encode())
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return tuple(json.loads(answer)) if answer else (GONE, 0, "")


def content(folder: Path) -> dict[str, str]:
    """A hash of each file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def indexed(folder: Path) -> dict[str, str]:
    """A hash of the shard of each key, as the index of a model's folder names it; empty without an index."""
    index = folder / "model" / "model.safetensors.index.json"
    if not index.exists():
        return {}
    shards = json.loads(index.read_text())["weight_map"]
    return {
        k: hashlib.sha256((index.parent / name).read_bytes()).hexdigest()[:12] for k, name in shards.items()
    }


def merge_into(target: str, shard_size: int | None, alpha: float, folder: Path) -> None:
    """Merge two folders into a target."""
    from mecha_exp import EngineOptions, Job, merge_many, weighted_sum

    recipe = weighted_sum(str(folder / "a"), str(folder / "b"), alpha=alpha)
    job = Job(recipe, folder / "out" / target, shard_size=shard_size, metadata={"format": "pt"})
    merge_many([job], EngineOptions(workers=1))


def prepare(folder: Path) -> None:
    """Two models in folders, whose small files differ, so that the first decides which is new."""
    import torch
    from safetensors.torch import save_file

    for number, name in enumerate("ab"):
        (folder / name).mkdir()
        tensors = {f"w.{key}": torch.full((40, 5), float(number + key)) for key in range(3)}
        save_file(tensors, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text('{"model_type": "any"}')
        (folder / name / "tokenizer.json").write_text('{"new": 1}')
    (folder / "out").mkdir()


def replaced_model(target: str, shard_size: int | None) -> Callable[[Path], None]:
    """Writes the model that is replaced, with other small files and in fewer shards, and a file of a user."""

    def write(folder: Path) -> None:
        merge_into(target, shard_size and shard_size * 2, 0.1, folder)
        if shard_size:
            (folder / "out" / target / "tokenizer.json").write_text('{"old": 1}')
            (folder / "out" / target / "notes").mkdir()
            (folder / "out" / target / "notes" / "mine.txt").write_text("mine")

    return write


def without_exchange(work: Callable[[Path], None]) -> Callable[[Path], None]:
    """The work where no system call exchanges two folders."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "not here")

    def run(folder: Path) -> None:
        from mecha_exp.checkpoint.transaction import staging

        staging._exchange = refuse
        work(folder)

    return run


def shards(folder: Path) -> None:
    merge_into("model", 900, 0.3, folder)


SCENARIOS: dict[str, tuple[Callable[[Path], None] | None, Callable[[Path], None]]] = {
    "file": (
        replaced_model("model.safetensors", None),
        lambda folder: merge_into("model.safetensors", None, 0.3, folder),
    ),
    "new folder": (None, shards),
    "replaced folder": (replaced_model("model", 900), shards),
    "replaced in place": (replaced_model("model", 900), without_exchange(shards)),
}
"""What is there before, and the work, by name."""


def main(scenario: str, folder: Path, kind: str, count: int) -> None:
    before, work = SCENARIOS[scenario]
    import mecha_exp.checkpoint.folder_writer
    import mecha_exp.engine.merge  # noqa: F401  once, and not in every child
    from mecha_exp.method_api.registry import all_methods

    all_methods()
    folder.mkdir()
    in_child(lambda: prepare(folder), folder, "none", 0)
    if before:
        in_child(lambda: before(folder), folder, "none", 0)
    out, kept = folder / "out", folder / "kept"
    shutil.copytree(out, kept)
    status, calls, error = in_child(lambda: work(folder), folder, "none", 0)
    assert not status, error
    report: dict[str, Any] = {"old": content(kept), "new": content(out), "starts": []}
    report |= {"old weights": indexed(kept), "new weights": indexed(out)}
    chosen = range(1, calls + 1) if not count else [1 + i * (calls - 1) // (count - 1) for i in range(count)]
    for at in chosen:
        shutil.rmtree(out)
        shutil.copytree(kept, out)
        status, _, error = in_child(lambda: work(folder), folder, kind, at)
        left, weights = content(out), indexed(out)
        again, _, trouble = in_child(lambda: work(folder), folder, "none", 0)
        start: dict[str, Any] = {"at": at, "status": status, "error": error, "left": left, "weights": weights}
        report["starts"].append(
            {**start, "again": again, "trouble": trouble, "then": content(out), "last": indexed(out)}
        )
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

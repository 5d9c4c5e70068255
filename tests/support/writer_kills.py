"""Kills commands before their changes of files, for every kind of output; a program of its own, for `fork`.

    python writer_kills.py FOLDER COUNT SCENARIO...

runs the command of each scenario undisturbed, over what an earlier one has written, and notes which functions
of mecha_exp have changed a file. For COUNT of its changes (0: for every one) it then runs it again with the
process gone before that change, and once more to its end.
Prints as JSON by scenario the functions, and of each start what was left and what the next one gave.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from crash_points import GONE, Fault, content

import mecha_exp
from mecha_exp import cli
from mecha_exp.cli import GROUP, VERBS
from mecha_exp.entry_points import announced
from mecha_exp.method_api.registry import all_methods

PACKAGE = str(Path(mecha_exp.__file__).parent)
DIGITS = "pkg://mecha_exp.examples.digits"
SWEEP = ("recipe=weighted_sum", "tracking.uri=sqlite:///outputs/runs.db", "output=none", "-m")


@dataclass(frozen=True)
class Scenario:
    """A command that writes.

    Attributes:
        words: the command.
        outputs: what it writes, by patterns below the folder; at each moment all are old, or all are new.
        before: the command that has written what it replaces; empty where there is nothing.
        wrapped: what else is different about the system.
    """

    words: tuple[str, ...]
    outputs: tuple[str, ...]
    before: tuple[str, ...] = ()
    wrapped: Callable[[], None] | None = None


def _without_exchange() -> None:
    """A system that cannot exchange two folders."""
    from mecha_exp.checkpoint.transaction import staging

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "not here")

    staging._exchange = refuse  # type: ignore[assignment]


_RUN = (
    "models.base=base",
    "models.experts=[a,b]",
    "recipe=task_arithmetic",
    "tracking=none",
    "evaluator=none",
)
_ADAPTERS = ("adapters", "a", "b", "-o", "out")
_EXTRACT = ("adapters", "extract", "fine", "base", "out", "--leave-out", "*.bias", "*norm*", "*embed*")
_BARE = ("alpha=0.3,0.6", "evaluator=none", "tracking=none")
_CALIBRATE = ("calibrate", f"{DIGITS}/expert_0_3.safetensors", "module=digits", "data=0_3", "chunk=16")

SCENARIOS = {
    "a merged adapter": Scenario((*_ADAPTERS, "--rank", "3"), ("out/*",), _ADAPTERS),
    "a new adapter": Scenario(_ADAPTERS, ("out/*",)),
    "a merged adapter, file by file": Scenario(
        (*_ADAPTERS, "--rank", "3"), ("out/*",), _ADAPTERS, _without_exchange
    ),
    "an extracted adapter": Scenario((*_EXTRACT, "--rank", "1"), ("out/*",), (*_EXTRACT, "--rank", "3")),
    "the adapter of a run": Scenario(
        (*_RUN, "output=adapter", "output.path=out", "output.rank=2", "store=null"), ("out/*",), _ADAPTERS
    ),
    "a model's folder": Scenario(
        (*_RUN, "output.path=out", "recipe.scale=0.5", "store=null"),
        ("out/model.safetensors", "out/config.json"),
        (*_RUN, "output.path=out", "recipe.scale=0.25", "store=null"),
    ),
    "statistics": Scenario(
        (*_CALIBRATE, "kind=gram", "count=48", "output=out.safetensors"),
        ("out.safetensors",),
        (*_CALIBRATE, "kind=fisher", "count=16", "output=out.safetensors"),
    ),
    "a recipe": Scenario(
        ("compose", "template.mecha", "-p", "a", "fine", "-o", "out.mecha"),
        ("out.mecha",),
        ("compose", "template.mecha", "-p", "a", "base", "-o", "out.mecha"),
    ),
    "the figure of a comparison": Scenario(("diff", "base", "fine", "--figure", "out.png"), ("out.png",)),
    "nodes of ComfyUI": Scenario(("comfyui", "install", "custom_nodes"), ("custom_nodes/*/*",)),
    "a bundle": Scenario(("bundle", "--output", "out.zip"), ("out.zip",), (*SWEEP, *_BARE)),
    "a sweep": Scenario((*SWEEP, "alpha=0.3,0.6"), ()),
    "a search": Scenario(
        (*SWEEP, "alpha=interval(0,1)", "sweep=search", "sweep.trials=3", "sweep.batch=2"), ()
    ),
}
"""By what is written."""


class Watched(Fault):
    """A fault that notes the functions of the package that have changed a file, by file and first line."""

    def __init__(self, folder: Path, kind: str, at: int) -> None:
        self.functions: set[tuple[str, int]] = set()
        super().__init__(folder, kind, at)

    def _call(self, event: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE):
                self.functions.add((code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_firstlineno))
            frame = frame.f_back
        super()._call(event)


def prepare(folder: Path) -> None:
    """A base, two adapters of it, and a model that was made of them."""
    import torch
    from safetensors.torch import save_file

    sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
    from peft_tensors import SHAPES, O, Q, lora, rand

    from mecha_exp import parameter, serialize, weighted_sum

    tensors = {key: rand(*shape, seed=number) for number, (key, shape) in enumerate(SHAPES.items())}
    layers = {k: v + 0.1 * rand(*v.shape, seed=9) if "proj.weight" in k else v for k, v in tensors.items()}
    for name, model in {"base": tensors, "fine": layers}.items():
        (folder / name).mkdir()
        save_file(model, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text('{"tie_word_embeddings": false}')
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
    for name, factors in {"a": lora(Q), "b": lora(Q, O, seed=7)}.items():
        (folder / name).mkdir()
        save_file(factors, folder / name / "adapter_model.safetensors")
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
    (folder / "custom_nodes").mkdir()
    (folder / "template.mecha").write_text(serialize(weighted_sum(parameter("a"), "base", alpha=0.3)))
    torch.set_num_threads(1)


def run(folder: Path, words: Sequence[str], wrapped: Callable[[], None] | None) -> int:
    """Run a command in this process, and its words into a file; returns its status."""
    os.chdir(folder)
    silence = os.open(folder.parent / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sys.argv = ["mecha_exp", *words]
    if wrapped:
        wrapped()
    try:
        return cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)


def in_child(scenario: Scenario, folder: Path, words: Sequence[str], at: int) -> dict[str, Any]:
    """Run a command in a child, which is gone before its `at`-th change (0: never); returns what it did."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        fault = Watched(folder, "kill" if at else "none", at)
        status = run(folder, words, scenario.wrapped)
        fault._kind = "none"
        os.write(sending, json.dumps([status, fault.calls, sorted(fault.functions)]).encode())
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    status, calls, functions = json.loads(answer) if answer else (GONE, 0, [])
    said = (folder.parent / "said.txt").read_text(errors="replace")
    return {"status": status, "calls": calls, "functions": functions, "said": said}


def outputs(scenario: Scenario, folder: Path) -> dict[str, str]:
    """A hash of each file that the command writes; hidden ones are no output."""
    chosen = {path.relative_to(folder).as_posix() for p in scenario.outputs for path in folder.glob(p)}
    return {name: digest for name, digest in content(folder).items() if name in chosen and "/." not in name}


def damaged(folder: Path) -> list[str]:
    """The files that can be seen and are not whole, whatever they say."""
    seen = (
        p for p in folder.rglob("*") if p.is_file() and "/." not in f"/{p.relative_to(folder).as_posix()}"
    )
    return [path.relative_to(folder).as_posix() for path in seen if not _is_whole(path)]


def _is_whole(path: Path) -> bool:
    data = path.read_bytes()
    if path.suffix == ".json":
        try:
            return json.loads(data) is not None
        except ValueError:
            return False
    ends = {".png": b"\xaeB`\x82", ".html": b"</html>", ".parquet": b"PAR1", ".yaml": b"\n", ".csv": b"\n"}
    return data.rstrip(b"\n" * (path.suffix == ".html")).endswith(ends.get(path.suffix, b""))


def killed(scenario: Scenario, place: Path, count: int) -> dict[str, Any]:
    """The starts of one scenario."""
    folder, kept = place / "work", place / "kept"
    folder.mkdir(parents=True)
    if not (child := os.fork()):
        prepare(folder)
        os._exit(0)
    os.waitpid(child, 0)
    if scenario.before:
        _require(in_child(scenario, folder, scenario.before, 0))
    if (folder / "out").is_dir():
        (folder / "out" / "mine.txt").write_text("stays")
    shutil.copytree(folder, kept)
    whole = in_child(scenario, folder, scenario.words, 0)
    _require(whole)
    old, new, calls = outputs(scenario, kept), outputs(scenario, folder), whole["calls"]
    count = min(count, calls) or calls
    starts = []
    for at in sorted({1 + round(i * (calls - 1) / max(count - 1, 1)) for i in range(count)}):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        first = in_child(scenario, folder, scenario.words, at)
        left, broken = outputs(scenario, folder), damaged(folder)
        then = in_child(scenario, folder, scenario.words, 0)
        starts.append({"at": at, "status": first["status"], "left": left, "broken": broken})
        starts[-1] |= {"again": then["status"], "said": then["said"], "then": outputs(scenario, folder)}
        starts[-1]["damaged"] = damaged(folder)
    return {"functions": whole["functions"], "calls": calls, "old": old, "new": new, "starts": starts}


def _require(start: dict[str, Any]) -> None:
    if start["status"]:
        sys.exit(f"the command failed: {start['said'][-2000:]}")


def main(folder: Path, count: int, names: Sequence[str]) -> None:
    all_methods()
    for entry in announced(GROUP).values():
        entry.load()
    for module in ("app.main", "peft.merge", "engine.merge", "report", *(f"cli.{verb}" for verb in VERBS)):
        importlib.import_module(f"mecha_exp.{module}")  # once, and not in every child
    os.environ["MECHA_EXP_CACHE"] = "off"
    report = {name: killed(SCENARIOS[name], folder / str(i), count) for i, name in enumerate(names)}
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

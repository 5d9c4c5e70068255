"""Every output is old or new when its command is killed, and the same command then gives the new one.

The places that write are found in the source: a new one fails here until a command kills it, or it is said
why none does.
"""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import printed
from writer_kills import SCENARIOS

import mecha_exp

REPOSITORY = Path(__file__).parents[1]
PACKAGE = Path(mecha_exp.__file__).parent
FEW, SOME = 5, 8
SAMPLE = ("a merged adapter", "a merged adapter, file by file")

ATOMIC = {"atomic_write", "atomic_write_text", "replace_text", "replaced_together"}
PLAIN = {"save_file", "copyfile", "copytree", "hardlink_to", "symlink_to"}
BY_ONE_ARGUMENT = {"write_text", "write_bytes"}
"""Methods of paths; writers of tensors have such with more arguments."""
PRIMITIVES = ("system/atomic_write.py", "checkpoint/transaction/")

ONE_FILE = "one file at a time, by atomic_write, which the others use"
SCRATCH = "in a temporary or hidden folder, whose owner removes it"
CACHE = "a cache: a part of it that is not whole is not believed"
CLAIM = "a claim, a call or an answer of a worker: tests/app/shares, tests/cluster"
WRITERS = {
    "api.py:_constants": ONE_FILE,
    "app/adaptive/progress.py:write_progress": ONE_FILE,
    "app/adaptive/progress.py:write_tables": ONE_FILE,
    "app/adaptive/soup.py:_write": ONE_FILE,
    "app/config/execution.py:_write_configs": "a sweep",
    "app/launchers/share.py:keep": CLAIM,
    "app/outputs/cards.py:note_results": "a model's folder",
    "app/reproduction/remake.py:_point": SCRATCH,
    "app/reproduction/sources.py:restore_plugins": SCRATCH,
    "app/launchers/run.py:_write_files": "the adapter of a run",
    "app/search/search.py:collect": "from shares to the search: tests/app/search/test_search_shared.py",
    "app/search/storage.py:_mend_journal": "cuts a torn line: tests/app/search/test_search.py",
    "app/search/trials.py:write_trials": "a search",
    "calibration/progress.py:__enter__": "statistics",
    "calibration/progress.py:finish": "statistics",
    "calibration/progress.py:save": "statistics",
    "checkpoint/folder_in_place.py:publish_in_place": "killed in tests/checkpoint/test_crash_points.py",
    "checkpoint/folder_writer.py:_put": "a model's folder",
    "checkpoint/remote/content_cache.py:fetching": CACHE,
    "checkpoint/remote/lookup.py:_write": SCRATCH,
    "checkpoint/remote/lookup.py:_write_file": SCRATCH,
    "checkpoint/remote/lookup.py:fetch_small_files": ONE_FILE,
    "checkpoint/remote/stand_in.py:write": SCRATCH,
    "comfyui/install.py:main": "nodes of ComfyUI",
    "cluster/claims.py:__init__": CLAIM,
    "cluster/processes.py:_fill": CLAIM,
    "cluster/processes.py:_started_process": "a log",
    "cluster/processes.py:carry_out": CLAIM,
    "evaluation/context.py:_append": "a line of a journal: tests/app/outputs/test_partial_measurements.py",
    "evaluators/common/networks.py:write_model": SCRATCH,
    "evaluators/pictures/drawing.py:_keep": ONE_FILE,
    "inspection/model_diff.py:draw_models": "the figure of a comparison",
    "lab/bucket.py:fetch": SCRATCH,
    "lab/store.py:_write": "a sweep",
    "peft/writer.py:write_adapter": "a merged adapter",
    "recipe/text.py:write_text": "a recipe",
    "report/export.py:write_csv": "a sweep",
    "report/export.py:write_parquet": "a sweep",
    "report/figures/__init__.py:_save": "a sweep",
    "report/figures/contact_sheet.py:draw_contact_sheets": ONE_FILE,
    "report/page/html.py:write_report": "a sweep",
    "runs/bundle.py:_extract": SCRATCH,
    "runs/bundle.py:write_bundle": "a bundle",
    "runs/files.py:add_files": ONE_FILE,
    "runs/outcomes.py:write_outcomes": "a sweep",
    "runs/record.py:write_json": "the adapter of a run",
    "system/cache.py:write_cached": CACHE,
    "system/memory.py:__enter__": "no file: a switch of the kernel",
    "tracking/backend.py:copy_artifacts": "a sweep",
    "tracking/database.py:create_database": "a sweep",
}
"""Each place that writes, with a scenario that kills it or the reason why none does."""


def called(node: ast.Call) -> str:
    """The name that a call uses to write a file; empty for any other call."""
    function = node.func
    name = getattr(function, "id", getattr(function, "attr", ""))
    if name in ATOMIC | PLAIN or (name in BY_ONE_ARGUMENT and len(node.args) == 1):
        return name
    modes = [word.value for word in (*node.args, *(k.value for k in node.keywords)) if is_mode(word)]
    return name if name in ("open", "ZipFile") and modes else ""


def is_mode(word: ast.expr) -> bool:
    """Whether an argument is the mode of a file that is written."""
    value = getattr(word, "value", None)
    return isinstance(value, str) and set(value) <= set("rwaxbt+") and bool(set(value) & set("wax+"))


def writers() -> dict[str, tuple[str, int]]:
    """The functions that write files: file and first line, by file and name."""

    def walk(node: ast.AST, around: ast.AST | None) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Call) and called(child) and around is not None:
                yield around
            yield from walk(child, child if is_function else around)

    found = {}
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith(PRIMITIVES):
            for function in walk(ast.parse(path.read_text(encoding="utf-8")), None):
                assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
                first = min([function.lineno, *(word.lineno for word in function.decorator_list)])
                found[f"{file}:{function.name}"] = (file, first)
    return found


def killed(folder: Path, count: int, *names: str) -> dict[str, Any]:
    """Kill the commands of scenarios at so many of their changes."""
    report: dict[str, Any] = json.loads(printed("writer_kills", folder, count, *names, timeout=3000))
    return report


def check(report: dict[str, Any]) -> None:
    for name, scenario in report.items():
        ends = {"old": 0, "new": 0}
        for start in scenario["starts"]:
            about = f"{name}, killed before change {start['at']}: {start}"
            assert start["left"] in (scenario["old"], scenario["new"], *absent(scenario, name)), about
            assert start["broken"] == start["damaged"] == [], about
            assert start["again"] == 0, about
            assert start["then"] == scenario["new"], about
            ends["new" if start["left"] == scenario["new"] else "old"] += 1
        print(f"{name}: {scenario['calls']} changes, {len(scenario['starts'])} kills, then {ends}")  # noqa: T201


def absent(scenario: dict[str, Any], name: str) -> list[dict[str, str]]:
    """File by file, the configuration of an adapter is missing for a moment, and so no library loads it."""
    if "file by file" not in name:
        return []
    config = "out/adapter_config.json"
    return [{k: v for k, v in scenario[age].items() if k != config} for age in ("old", "new")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_adapter_is_old_or_new_at_every_kill(tmp_path: Path) -> None:
    check(killed(tmp_path, FEW, *SAMPLE))


def test_each_place_that_writes_is_known() -> None:
    assert writers().keys() == WRITERS.keys(), (
        "give it a scenario in tests/support/writer_kills.py, or say why none"
    )
    words = [word.strip(",") for reason in WRITERS.values() for word in reason.split()]
    tests = [word for word in words if word.startswith("tests/")]
    assert tests and all((REPOSITORY / path).exists() for path in tests)


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_output_is_old_or_new_at_every_kill(tmp_path: Path) -> None:
    light = [name for name in SCENARIOS if name not in ("a sweep", "a search")]

    report = killed(tmp_path / "light", 0, *light) | killed(tmp_path / "long", SOME, "a sweep", "a search")

    check(report)
    for name, place in sorted(writers().items()):
        by = [each for each, scenario in report.items() if list(place) in scenario["functions"]]
        assert WRITERS[name] in by or (not by and WRITERS[name] not in SCENARIOS), (name, by)
        print(f"{name}: {', '.join(by) or WRITERS[name]}")  # noqa: T201

"""Which one-line changes of a package do its tests notice? `mutants.py PACKAGE TESTS [--sample N]`.

Runs in a copy of the project, whose files it changes by the operators of cosmic-ray, one at a time. The tests
run in a forked process that has torch and scipy loaded, the quickest file first, which is several times as
fast as to start Python for each change. Changes of annotations are left out, since nothing reads them.
Prints each change that survives, and the share that is noticed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

LIMIT_SECONDS = 300
_NO_TESTS = 5
Place = tuple[int, int]


@dataclass(frozen=True)
class Change:
    """The `occurrence`-th place of a file that an operator changes."""

    path: Path
    operator: str
    occurrence: int

    def survives(self, tests: Sequence[str]) -> list[str]:
        """Try the change. Returns its lines if the tests pass, else nothing."""
        before = self.path.read_text(encoding="utf-8")
        after = mutate_code(before, get_operator(self.operator)(), self.occurrence)
        if after is None or after == before:
            return []
        self.path.write_text(after, encoding="utf-8")
        try:
            passed = _pass(tests)
        finally:
            self.path.write_text(before, encoding="utf-8")
        name = str(self.path)
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, "", "", 1, "")
        return list(lines)[1:] if passed else []


def main() -> None:
    """Try all changes, or a sample that is the same each time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("tests", type=Path)
    parser.add_argument("--sample", type=int, default=None)
    options = parser.parse_args()
    _load()
    changes = [change for path in sorted(options.package.rglob("*.py")) for change in _changes(path)]
    if options.sample is not None:
        changes = random.Random(0).sample(changes, min(options.sample, len(changes)))
    tests = _quickest_first(sorted(options.tests.rglob("test_*.py")))
    began, survived = time.monotonic(), 0
    for number, change in enumerate(changes, 1):
        if lines := change.survives(tests):
            survived += 1
            sys.stdout.write("\n".join(lines) + "\n")
        left = (time.monotonic() - began) / number * (len(changes) - number) / 60
        sys.stdout.write(f"{number} of {len(changes)} tried, {survived} survived, {left:.0f} min left\n")
        sys.stdout.flush()
    sys.stdout.write(f"{100 * (1 - survived / max(1, len(changes))):.1f} % are noticed\n")


def _load() -> None:
    """Import what takes long and is not the project itself."""
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401

    sys.dont_write_bytecode = True
    sys.path.insert(0, str(Path.cwd()))


def _changes(path: Path) -> Iterator[Change]:
    """The changes of a file, but for those of annotations."""
    source = path.read_text(encoding="utf-8")
    tree, annotations = get_ast(source), _annotations(source)
    for name in operator_names():
        if get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        positions = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            if not any(first <= start and end <= last for first, last in annotations):
                yield Change(path, name, occurrence)


def _annotations(source: str) -> list[tuple[Place, Place]]:
    """The first and last places of the annotations of a file."""
    nodes = [
        part
        for node in ast.walk(ast.parse(source))
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
    ]
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes]


def _quickest_first(files: Sequence[Path]) -> list[str]:
    """The files of tests in the order of their time; all must pass without a change."""
    seconds = {}
    for file in files:
        began = time.monotonic()
        if not _pass([str(file)]):
            sys.exit(f"{file} fails without a change")
        seconds[str(file)] = time.monotonic() - began
    return sorted(seconds, key=seconds.__getitem__)


def _pass(tests: Sequence[str]) -> bool:
    """Whether the tests pass, or none is to run, in a process of their own that has a limit of time."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_SECONDS)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not heavy and not libraries"]
        os._exit(int(pytest.main([*options, *tests])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, _NO_TESTS)


if __name__ == "__main__":
    main()

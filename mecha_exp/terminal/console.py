"""The consoles: lines, errors and tables for people, and JSON for programs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mecha_exp.runs.record import json_ready

_UNLIMITED = 1 << 16
"""A width that no table reaches."""
_SETTING = re.compile(
    r"(?<![\w.(])(?=(?:on_(?:channels|extra|integers|missing|nonfinite|prefix|quantised|tied|tokens)|resize_embeddings"
    r"|running_stats|stacked_experts|memory_budget)=\w)"
)
"""The places before the settings that messages of the engine name."""


class _Console(Console):
    """A console that ends the process quietly when its reader has gone, as in `... | head`."""

    def on_broken_pipe(self) -> None:
        """End with the status that shells give to such a process; what was done is written all the same."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141)


stdout = _Console(highlight=False, emoji=False)
stderr = _Console(stderr=True, highlight=False, emoji=False)


def print_line(text: str) -> None:
    """Print a text to standard output as it is: without markup, in one line where the terminal is narrow."""
    stdout.print(text, markup=False, soft_wrap=True)


def program_name() -> str:
    """The name that the program was called by, for messages."""
    return "mecha-exp" if Path(sys.argv[0]).stem == "mecha-exp" else "python -m mecha_exp"


def show_error(message: str) -> None:
    """Print an error to standard error."""
    stderr.print(f"[bold red]error:[/] {escape(printable(as_typed(message)))}", soft_wrap=True)


def as_typed(message: str) -> str:
    """A message with the engine's settings as a command line has them; in Python they are keywords.

    >>> as_typed("on_tied=untie reads the one for the other")
    'engine.on_tied=untie reads the one for the other'
    """
    return _SETTING.sub("engine.", message)


def printable(text: str) -> str:
    """A text with its control characters written out, which would move the cursor or change colours.

    >>> printable("a" + chr(27) + "[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def agrees(question: str) -> bool:
    """Ask at the terminal; only a yes is one."""
    return stdout.input(escape(question)).strip().lower() in ("y", "yes")


def print_json(value: Any) -> None:
    """Print data for other programs to standard output; NaN and infinities, which JSON lacks, become null."""
    data = json_ready(value, lambda number: None)
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def make_table(*headings: str) -> Table:
    """An empty table in our style."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print a table; where standard output is not a terminal, with no path shortened or folded."""
    if not stdout.is_terminal:
        natural = Measurement.get(stdout, stdout.options.update(max_width=_UNLIMITED), table).maximum
        table.width = natural if natural > stdout.width else None
    stdout.print(table, crop=False, no_wrap=True)


class PathCell:
    """A path in a table, shortened in its middle to the width of its column."""

    def __init__(self, path: object) -> None:
        self._path = str(path)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shortened_path(self._path, options.max_width), overflow="fold", no_wrap=False)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self._path), options.max_width), len(self._path))


def shortened_path(path: str, width: int) -> str:
    """A path with its middle left out where it is longer than `width`; the file's name stays whole.

    >>> shortened_path("/data/models/of/last/year/base.safetensors", 30)
    '/data/mod…ear/base.safetensors'
    >>> shortened_path("/data/models/of/last/year/base.safetensors", 10)
    '…/base.safetensors'
    """
    if len(path) <= width:
        return path
    tail = max(width - 1 - (width - 1) // 3, len(Path(path).name) + 1)
    head = max(width - 1 - tail, 0)
    return f"{path[:head]}…{path[-tail:]}" if head + tail + 1 < len(path) else path

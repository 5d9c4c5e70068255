"""The progress of lm-evaluation-harness, whose bars count requests, and the answers that it keeps."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mecha_exp.evaluation.context import Context

_WITH_BARS = (
    *("lm_eval.models.huggingface", "lm_eval.models.dummy"),
    *("lm_eval.api.model", "lm_eval.api.task"),
)
_WHERE_INSTALLED = "lm_eval.models.vllm_causallms"


def kept_answers(context: Context) -> str | None:
    """Where the harness keeps its answers until all are there; None where nothing can be kept.

    A damaged file of an earlier start is removed: its requests are asked again.
    """
    if context.kept is None:
        return None
    file = Path(f"{context.kept}_rank0.db")  # as the harness calls it
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            is_intact = _is_intact(file)
        except sqlite3.OperationalError:  # it cannot be written, or another process is at it
            return None
        except sqlite3.DatabaseError:
            is_intact = False
        if not is_intact:
            file.unlink()
    except OSError:
        return None
    return str(context.kept)


def _is_intact(file: Path) -> bool:
    """Whether a database, which is created if there is none, can be read and written."""
    with closing(sqlite3.connect(file)) as database:
        database.execute("BEGIN IMMEDIATE")
        checked: str = database.execute("PRAGMA quick_check").fetchone()[0]
        return checked == "ok"


@contextmanager
def shown_requests(context: Context) -> Iterator[None]:
    """Within it the bars of the harness show the progress of a measurement."""

    class Bar:
        """A bar of tqdm, as far as the harness uses it."""

        def __init__(self, items: Iterable[Any] = (), *, total: int | None = None, **settings: Any) -> None:
            self._items, self._done, self._total = items, 0, total

        def __iter__(self) -> Iterator[Any]:
            return iter(self._items)  # preparations

        def update(self, count: int = 1) -> None:
            self._done += count
            context.show("requests", self._done, self._total or self._done)

        def close(self) -> None:
            """Nothing is left to do."""

    with ExitStack() as patches:
        for module in (*_WITH_BARS, *({_WHERE_INSTALLED} & sys.modules.keys())):
            patches.enter_context(patch(f"{module}.tqdm", Bar))
        yield

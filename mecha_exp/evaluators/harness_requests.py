"""The progress of lm-evaluation-harness, whose bars count requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from mecha_exp.evaluation.context import Context

_WITH_BARS = ("lm_eval.models.huggingface", "lm_eval.api.model", "lm_eval.api.task")


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
        for module in _WITH_BARS:
            patches.enter_context(patch(f"{module}.tqdm", Bar))
        yield

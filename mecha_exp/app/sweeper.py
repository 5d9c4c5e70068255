"""The sweeper of the lab: Hydra's grid, without composing every point once more to see whether it can be."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper


class LabSweeper(BasicSweeper):
    """A grid of what the command line lists."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: names were checked before the start, and what is wrong with a point its job reports."""

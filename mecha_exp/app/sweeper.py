"""The sweeper of the lab: it makes the points that the group `sweep` describes.

A grid is what Hydra's own sweeper makes; this one adds the other modes, drops repeated points, and does not
compose every point once more to see whether it can be.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override

from mecha_exp.app.points import points_of


class LabSweeper(BasicSweeper):
    """Runs the points of a sweep, in batches of `max_batch_size` or all at once."""

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The overrides of each point, in batches."""
        assert self.config is not None
        points = points_of(overrides, self.config).words
        return [list(batch) for batch in self.split_overrides_to_chunks(points, max_batch_size)]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: names were checked before the start, and what is wrong with a point its job reports."""

"""The sweeper of the lab: it runs the points that the group `sweep` describes.

A grid is what Hydra's own sweeper makes; `app/points.py` makes the other modes, too, when the command line is
checked. This one runs what was checked, and does not compose every point once more to see whether it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override


class LabSweeper(BasicSweeper):
    """Runs the points of a sweep, in batches of `max_batch_size` or all at once.

    Attributes:
        jobs: the overrides of each point.
    """

    jobs: ClassVar[Sequence[Sequence[str]]] = ()

    @classmethod
    def of(cls, jobs: Sequence[Sequence[str]]) -> type[LabSweeper]:
        """The class for these points, which Hydra makes an object of."""
        return type(cls.__name__, (cls,), {"jobs": jobs})

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The overrides of each point, in batches."""
        batches = self.split_overrides_to_chunks([list(job) for job in self.jobs], max_batch_size)
        return [list(batch) for batch in batches]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: names were checked before the start, and what is wrong with a point its job reports."""

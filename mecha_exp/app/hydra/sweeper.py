"""The sweeper of the lab: runs the points of a sweep that were listed when the command line was checked."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override

from mecha_exp.app.hydra.compose import JOBS


class LabSweeper(BasicSweeper):
    """Runs the points of the group `sweep`, in batches of `max_batch_size` or all at once.

    The points were listed when the command line was checked, and `run_jobs` passes them on. So they are not
    composed once more to check them.
    """

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The overrides of each point, in batches."""
        batches = self.split_overrides_to_chunks([list(job) for job in JOBS.get()], max_batch_size)
        return [list(batch) for batch in batches]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: names were checked before the start, and each job reports the errors of its point."""

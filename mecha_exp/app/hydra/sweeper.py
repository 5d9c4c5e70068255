"""The sweeper of the lab: runs the points of a sweep, which `run_jobs` passes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override

from mecha_exp.app.hydra.compose import BATCHES, Batch


class LabSweeper(BasicSweeper):
    """Runs the points of the group `sweep`, at most `max_batch_size` at a time.

    The points of most sweeps were listed when the command line was checked, and a search asks for its own
    batch by batch. So they are not composed once more to check them.
    """

    _batches: Iterator[Batch]
    _batch: Batch

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Begin with the first batch, whose jobs have the overrides of the command line already."""
        self._batches = (
            part
            for batch in BATCHES.get()
            for part in self.split_overrides_to_chunks([list(job) for job in batch], max_batch_size)
        )
        return []

    def is_done(self) -> bool:
        """Whether no batch is left; requests the next one."""
        self._batch = next(self._batches, ())
        return not self._batch

    def get_job_batch(self) -> Batch:
        """The overrides of each job of the next batch."""
        return self._batch

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: names were checked before the start, and each job reports the errors of its point."""

"""The sweeper of the lab: runs the points of a sweep, which `Composer.run` passes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from mecha_exp.app.hydra.compose import BATCHES, COMPOSE
from mecha_exp.app.hydra.jobs import Jobs


class LabSweeper(BasicSweeper):
    """Runs the points of the group `sweep`, at most `max_batch_size` at a time.

    The points of most sweeps were listed when the command line was checked, and a search asks for its own
    batch by batch. So they are not composed once more to check them.
    """

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Launch the jobs of each batch under their numbers; a batch has run when the next is requested."""
        assert self.config is not None and self.hydra_context is not None
        folder = Path(str(self.config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        token = COMPOSE.set(partial(Jobs, self.hydra_context.config_loader, self.config))
        try:
            return list(self._launched())
        finally:
            COMPOSE.reset(token)

    def _launched(self) -> Iterator[Sequence[JobReturn]]:
        assert self.launcher is not None
        for batch in BATCHES.get():
            size = self.max_batch_size or len(batch.jobs)
            for start in range(0, len(batch.jobs), size):
                jobs = batch.jobs[start : start + size]
                results = self.launcher.launch(jobs, initial_job_idx=batch.first + start)
                for result in results:
                    _ = result.return_value  # raises if Hydra could not run the job
                yield results

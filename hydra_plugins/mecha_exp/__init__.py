"""Our launchers as a plugin of Hydra's, for the sweepers of others (`hydra/sweeper=...`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LabLauncher(Launcher):
    """The launcher that `hydra/launcher` names, with its settings."""

    def __init__(self, **settings: Any) -> None:
        """Hydra makes it of its settings, which are read from the configuration."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Open the launcher of a configuration; the task is always the same."""
        from mecha_exp.app.config.compose import Composer
        from mecha_exp.app.launchers.batches import launch_of

        self._launch = launch_of(Composer.of(config), config, hydra_context.callbacks)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs; returns their return values."""
        return self._launch(job_overrides, initial_job_idx)

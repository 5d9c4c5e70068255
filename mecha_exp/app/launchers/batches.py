"""Runs the points of a sweep batch by batch, or a single one, with the events that Hydra has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.config.compose import CONFIG_NAME, Composer
from mecha_exp.app.config.execution import Callbacks, run_job
from mecha_exp.app.config.jobs import Batch, Composed
from mecha_exp.app.launchers.onepass import OnePass
from mecha_exp.app.launchers.run import run_point
from mecha_exp.app.launchers.shares import ProcessShares, RayShares, SlurmShares

LAUNCHERS: Mapping[str, Callable[[DictConfig, Callbacks], OnePass]] = {
    "onepass": OnePass,
    "processes": ProcessShares,
    "ray": RayShares,
    "slurm": SlurmShares,
}
"""Our launchers by the names of `hydra/launcher`."""

Launch = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]
"""Runs jobs that are given by their overrides; the first one has a number, and those of the others follow."""


def run_alone(config: DictConfig) -> None:
    """Run the point of a configuration by itself."""
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name=CONFIG_NAME)
    returned = run_job(Composed(config), run_point, callbacks)
    callbacks.on_run_end(config=config, config_name=CONFIG_NAME, job_return=returned)


def run_batches(composer: Composer, config: DictConfig, batches: Iterable[Batch]) -> None:
    """Run the points of a sweep; a batch has run when the next one is asked for.

    Args:
        composer: of the command line.
        config: of the sweep as a whole.
        batches: its points.
    """
    callbacks = _begin(config)
    launch = launch_of(composer, config, callbacks)
    for batch in batches:
        size = config.hydra.sweeper.max_batch_size or len(batch.jobs)
        for start in range(0, len(batch.jobs), size):
            for returned in launch(batch.jobs[start : start + size], batch.first + start):
                _ = returned.return_value  # raises if a job of another launcher could not run
    callbacks.on_multirun_end(config=config, config_name=CONFIG_NAME)


def run_by_sweeper(config: DictConfig) -> None:
    """Let another sweeper than ours run the command line of a configuration."""
    callbacks = _begin(config)
    from hydra_plugins.mecha_exp import LabLauncher  # which Hydra does not find in an editable install

    Plugins.instance().register(LabLauncher)
    sweeper = Plugins.instance().instantiate_sweeper(
        config=config, hydra_context=_context(callbacks), task_function=run_point
    )
    sweeper.sweep(arguments=list(config.hydra.overrides.task))
    callbacks.on_multirun_end(config=config, config_name=CONFIG_NAME)


def launch_of(composer: Composer, config: DictConfig, callbacks: Any) -> Launch:
    """What runs the jobs of a sweep: one of our launchers, or a launcher that is a plugin of Hydra's.

    Args:
        composer: of the command line.
        config: of the sweep as a whole.
        callbacks: told of each job; ours or Hydra's, which have the same calls.
    """
    name = config.hydra.runtime.choices["hydra/launcher"]
    if name in LAUNCHERS:
        ours = LAUNCHERS[name](config, callbacks)
        settings = list(config.hydra.overrides.hydra)
        return lambda words, first: ours.launch(composer.jobs(settings, words, first, like=config))
    return Plugins.instance().instantiate_launcher(_context(callbacks), run_point, config).launch


def _context(callbacks: Any) -> HydraContext:
    return HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=callbacks)


def _begin(config: DictConfig) -> Callbacks:
    """Begin a sweep in its folder."""
    folder = Path(str(config.hydra.sweep.dir))
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "multirun.yaml")
    callbacks = Callbacks(config)
    callbacks.on_multirun_start(config=config, config_name=CONFIG_NAME)
    return callbacks

"""Runs jobs as Hydra does: in their folders, with their log, the files in `.hydra/`, and its callbacks.

Hydra's `run_job` copies the configuration six times and writes it with a slow YAML emitter, which takes
longer than to merge and measure a small model.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, env_override
from hydra.utils import instantiate
from omegaconf import DictConfig

from mecha_exp.app.config.jobs import Composed, enter


class Callbacks:
    """The callbacks of a configuration (`hydra.callbacks`); `callbacks.on_job_start(...)` tells all."""

    def __init__(self, config: DictConfig) -> None:
        self._all = [instantiate(callback) for callback in (config.hydra.callbacks or {}).values()]

    def __getattr__(self, event: str) -> Callable[..., None]:
        """What tells all of them of an event of Hydra's `Callback`; of an end, the last one is told first."""
        if not event.startswith("on_"):
            raise AttributeError(event)
        return partial(self._tell, event)

    def _tell(self, event: str, **about: Any) -> None:
        for callback in reversed(self._all) if event.endswith("_end") else self._all:
            try:
                getattr(callback, event)(**about)
            except Exception as error:  # which ends no run
                what = f"{type(callback).__name__}.{event}: {type(error).__name__}: {error}"
                warnings.warn(what, stacklevel=2)


def run_job(job: Composed, task: Callable[[DictConfig], Any], callbacks: Callbacks) -> JobReturn:
    """Run a job in its folder, with the files, the log and the callbacks of Hydra's `run_job`.

    Args:
        job: its configuration, with Hydra's part.
        task: called with the configuration.
        callbacks: told of its start and its end.

    Raises:
        Exception: whatever the task raises.
    """
    config, settings = job.config, job.config.hydra
    before = HydraConfig.instance().cfg
    folder = enter(config)
    job.note("hydra.runtime.output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    returned = JobReturn(
        list(settings.overrides.task), cfg=config, hydra_cfg=config, task_name=settings.job.name
    )
    try:
        with _working_folder(folder if settings.job.chdir else Path()):
            returned.working_dir = str(Path.cwd())
            configure_log(settings.job_logging, settings.verbose)
            if settings.output_subdir is not None:
                _write_configs(job.written, folder / settings.output_subdir)
            with env_override(settings.job.env_set):
                callbacks.on_job_start(config=config, task_function=task)
                returned.status = JobStatus.FAILED
                try:
                    returned.return_value, returned.status = task(config), JobStatus.COMPLETED
                finally:
                    callbacks.on_job_end(config=config, job_return=returned)
    finally:
        HydraConfig.instance().cfg = before
    return returned


@contextmanager
def _working_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _write_configs(written: Mapping[str, Any], folder: Path) -> None:
    """Write the files in which Hydra keeps the configuration of a job."""
    hydra = written["hydra"]
    texts = {
        "config": shared_yaml({key: value for key, value in written.items() if key != "hydra"}, yaml_text),
        "hydra": "hydra:\n" + shared_yaml(hydra, yaml_text, "hydra"),
        "overrides": yaml_text(hydra["overrides"]["task"]),
    }
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def shared_yaml(content: Mapping[str, Any], dump: Callable[[Any], str], *place: str) -> str:
    """A mapping as YAML, entry by entry: jobs have most of them in common.

    Args:
        content: plain data.
        dump: makes the text of a mapping.
        place: the keys that lead to the content in the file, whose lines are left out.
    """
    return "".join(_lines_of(dump, (*place, key), pickle.dumps(value)) for key, value in content.items())


@lru_cache(maxsize=512)
def _lines_of(dump: Callable[[Any], str], place: Sequence[str], pickled: bytes) -> str:
    content = reduce(lambda inner, key: {key: inner}, reversed(place), pickle.loads(pickled))
    return dump(content).split("\n", len(place) - 1)[-1]


def yaml_text(content: Any) -> str:
    """Plain data as YAML that OmegaConf reads as it was."""
    return str(yaml.dump(content, Dumper=_Dumper, allow_unicode=True, sort_keys=False))


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes in quotes what OmegaConf would read as a number, such as the text 1e3."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    [*"-+.0123456789"],
)

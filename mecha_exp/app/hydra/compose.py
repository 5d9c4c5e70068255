"""Hydra over our configuration: it composes, answers flags such as `--help`, and runs jobs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser, run_and_report
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig

from mecha_exp.app.hydra.choices import register_choices
from mecha_exp.app.hydra.presets import register_presets
from mecha_exp.errors import ConfigError

CONFIG_MODULE = "mecha_exp.conf"
CONFIG_NAME = "config"
VERSION_BASE = "1.3"


@contextmanager
def hydra_of(flags: Namespace) -> Iterator[Hydra]:
    """Hydra over the packaged configuration and a folder of the user's, as its own start-up makes it.

    Hydra's public `initialize` functions take one place only.

    Raises:
        ConfigError: the user's folder is not there.
    """
    register_presets()
    path = flags.config_path or f"pkg://{CONFIG_MODULE}"
    places = create_automatic_config_search_path(__file__, None, path)
    if flags.config_dir:
        if not Path(flags.config_dir).is_dir():
            raise ConfigError(f"--config-dir {flags.config_dir}: there is no such folder.")
        before_schema = SearchPathQuery(provider="schema", path=None)  # which must be last
        places.prepend("command-line", f"file://{Path(flags.config_dir).absolute()}", before_schema)
    current = GlobalHydra.instance()
    before = current.hydra
    hydra.version.setbase(VERSION_BASE)
    current.hydra = Hydra("mecha_exp", _Loader(places))
    try:
        yield current.hydra
    finally:
        current.hydra = before


def answer(arguments: Sequence[str]) -> None:
    """Let Hydra answer a flag such as `--help`, which runs nothing."""
    register_presets()
    register_choices()
    parser = get_args_parser()
    flags = parser.parse_args(list(arguments))
    if flags.help:
        with hydra_of(flags) as our:
            our.app_help(flags.config_name or CONFIG_NAME, parser, flags)
        return
    sys.argv = [sys.argv[0], *arguments]
    hydra.main(version_base=VERSION_BASE, config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)(
        lambda config: None
    )()


def run_jobs(arguments: Sequence[str], is_sweep: bool, task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra run a command line as one job, or as those of a sweep.

    `hydra.main` would compose the configuration once more, only to learn which of the two it is.

    Args:
        arguments: of the command line, flags first.
        is_sweep: whether there are several jobs.
        task: what is called with the configuration of each.
    """
    flags = get_args_parser().parse_args(list(arguments))
    words = [*flags.overrides, f"hydra.mode={'MULTIRUN' if is_sweep else 'RUN'}"]
    with hydra_of(flags) as our:
        run = our.multirun if is_sweep else our.run
        run_and_report(lambda: run(flags.config_name or CONFIG_NAME, task, words))


class _Loader(ConfigLoaderImpl):
    """Hydra's loader, which would copy all that it knows whenever it is asked for the options of a group."""

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """The names in a group; a configuration and overrides may add places to look for them."""
        if config_name is None and not overrides:
            return self.repository.get_group_options(group_name, results_filter)
        return super().get_group_options(group_name, results_filter, config_name, overrides)

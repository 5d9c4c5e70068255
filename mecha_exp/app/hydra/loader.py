"""Hydra's loader of configurations, which reads and joins the files once for each choice of files."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import Container, DictConfig

from mecha_exp.app.hydra.jobs import decides_files, note_task, parse_override
from mecha_exp.app.words.plain_data import as_written
from mecha_exp.documents import read_yaml
from mecha_exp.errors import prefixed

_FOLDERS_AND_MODE = ("hydra.mode", "hydra.run.dir", "hydra.sweep.dir")
"""Settings of Hydra that are only values, which a command sets after its check."""


class Loader(ConfigLoaderImpl):
    """Composes the configurations of a command from the files once for each choice of files.

    To compose one takes as long as many points of a small model. The check of a command line, the sweep as a
    whole and its points mostly choose the same files, so that their values are set on copies.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Repository(config_search_path)
        self._composed: dict[tuple[str | None, ...], bytes] = {}

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """The configuration that Hydra composes.

        Raises:
            HydraException: a word cannot be read, or names nothing.
        """
        parsed = [parse_override(word) for word in overrides]
        if any(o.key_or_group == "hydra.searchpath" for o in parsed):  # whose folders may have other groups
            return super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
        if validate_sweep_overrides:
            self.validate_sweep_overrides_legal(parsed, run_mode, from_shell)
        values = [o for o in parsed if not o.is_sweep_override() and not self._decides_files(o)]
        choices = [str(o.input_line) for o in parsed if self._decides_files(o)]
        config: DictConfig = pickle.loads(self._base(config_name, choices, run_mode))
        self._apply_overrides_to_config(values, config)
        config.hydra.overrides.hydra = [str(o.input_line) for o in parsed if o.is_hydra_override()]
        note_task(config, parsed)
        return config

    def _base(self, config_name: str | None, choices: Sequence[str], run_mode: RunMode) -> bytes:
        """The configuration with these files, pickled: read a hundred times as fast as composed."""
        key = (config_name, *choices)
        if key in self._composed:
            return self._composed[key]
        base = pickle.dumps(super().load_configuration(config_name, list(choices), run_mode))
        if run_mode is RunMode.RUN:  # that of a sweep may lack files that each point chooses
            self._composed[key] = base
        return base

    def _decides_files(self, override: Override) -> bool:
        if override.is_sweep_override() or override.key_or_group in _FOLDERS_AND_MODE:
            return False
        return decides_files(override, self._groups) and not isinstance(override.value(), dict)

    @cached_property
    def _groups(self) -> frozenset[str]:
        return frozenset(self.list_groups(""))

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        """Load a file; one in a folder of the user's is data, which names no code to run."""
        result = super()._load_single_config(default, repo)
        if result.path.startswith("file://"):
            _refuse_hydra_settings(result.config, str(default.config_path))
        return result

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """The names in a group. A configuration and overrides may add folders to the search path.

        Hydra would copy the whole repository for each list.
        """
        if config_name is None and not overrides:
            return self.repository.get_group_options(group_name, results_filter)
        return super().get_group_options(group_name, results_filter, config_name, overrides)


class _Repository(ConfigRepository):
    """Reads no file of the user's that goes beyond the limits of documents, such as those of aliases."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Read a file; None where there is none.

        Raises:
            DocumentError: it is not YAML, or goes beyond a limit.
        """
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is not None and source.scheme() == "file":
            path = Path(source.path, source._normalize_file_name(config_path))
            with prefixed(f"{path}: "):
                read_yaml(path)
        result: ConfigResult | None = super().load_config(config_path)
        return result


def _refuse_hydra_settings(config: Container, name: str) -> None:
    """Raise if a file of the user's changes Hydra's own settings; it may set the mode and what it varies."""
    settings = config.get("hydra") if isinstance(config, DictConfig) else None
    if settings is None:
        return
    entries = as_written(settings)
    names = [f"hydra.{key!s}" for key in entries] if isinstance(entries, dict) else ["hydra"]
    if isinstance(entries, dict) and isinstance(entries.get("sweeper"), dict):
        names.remove("hydra.sweeper")
        names += [f"hydra.sweeper.{key}" for key in entries["sweeper"]]
    refused = sorted(set(names) - {"hydra.mode", "hydra.sweeper.params"})
    if refused:
        raise ConfigCompositionException(
            f"{name}.yaml sets {', '.join(refused)}, which can run code. A file may set "
            "hydra.sweeper.params and hydra.mode; put other settings of Hydra on the command line."
        )

"""The folder of `--config-dir`: Hydra reads its files as data, within the limits of documents."""

from __future__ import annotations

import re
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf

from mecha_exp.app.words.plain_data import as_written
from mecha_exp.documents import DocumentError, read_yaml
from mecha_exp.errors import brief, prefixed

USER_FOLDER: ContextVar[Path | None] = ContextVar("USER_FOLDER", default=None)
"""The user's folder, while a command line is read and run."""

SCHEME = "data"
SUFFIX = ".yaml"
_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)\s*$", re.MULTILINE)
_HYDRA = re.compile(r"(?:^|[^\w])hydra(?:[^\w]|$)")


class DataFolder(ConfigSource):
    """A folder whose files are data: they name nothing to run, and keep within the limits of documents."""

    @staticmethod
    def scheme() -> str:
        """The scheme of such a folder in the search path."""
        return SCHEME

    def available(self) -> bool:
        """Whether the folder exists."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """Whether a path is that of a group."""
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Whether a path is that of a file."""
        return self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The names of the groups and files below a path."""
        names = set()
        for path in Path(self.path, config_path).iterdir():
            if path.is_dir() and results_filter is not ObjectType.CONFIG and path.name != "__pycache__":
                names.add(path.name)
            elif path.is_file() and path.suffix == SUFFIX and results_filter is not ObjectType.GROUP:
                names.add(path.stem)
        return sorted(names)

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file.

        Raises:
            DocumentError: it is not YAML, or goes beyond a limit.
            ConfigCompositionException: it changes settings of Hydra that can run code.
        """
        path = self._file(config_path)
        package, config = read_config(path)
        _refuse_hydra_settings(as_written(config), config_path, package)
        return ConfigResult(self.provider, self.full_path(), config, {"package": package})

    def _file(self, config_path: str) -> Path:
        name = config_path if config_path.endswith(SUFFIX) else f"{config_path}{SUFFIX}"
        return Path(self.path, name)


class UserFolder(SearchPathPlugin):
    """Puts the user's folder into Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder before Hydra's schema, which must be last."""
        if folder := USER_FOLDER.get():
            before_schema = SearchPathQuery(provider="schema", path=None)
            search_path.prepend("command-line", f"{SCHEME}://{folder.absolute()}", before_schema)


def read_config(path: Path) -> tuple[str | None, DictConfig | ListConfig]:
    """The package that the header of a file names, and what the file says.

    Raises:
        DocumentError: it is not YAML, no mapping, or goes beyond a limit.
    """
    with prefixed(f"{path}: "):
        if not isinstance(content := read_yaml(path), dict | None):
            raise DocumentError(f"expected a mapping, got {brief(content)}")
        if not isinstance(defaults := (content or {}).get("defaults"), list | None):
            raise DocumentError(f"defaults: expected a list, got {brief(defaults)}")
    text = path.read_text(encoding="utf-8")
    package = _PACKAGE.search(text[:512])
    return package[1] if package else None, OmegaConf.create(text)


def _refuse_hydra_settings(content: Any, name: str, package: str | None) -> None:
    """Raise if a file changes settings of Hydra; it may set the mode and what it varies."""
    settings = content.get("hydra") if isinstance(content, dict) else None
    names = [f"hydra.{key}" for key in settings] if isinstance(settings, dict) else []
    if settings is not None and not isinstance(settings, dict):
        names = ["hydra"]
    if isinstance(settings, dict) and isinstance(settings.get("sweeper"), dict):
        names.remove("hydra.sweeper")
        names += [f"hydra.sweeper.{key}" for key in settings["sweeper"]]
    refused = {*names} - {"hydra.mode", "hydra.sweeper.params"}
    if name.startswith("hydra/") or (package and _HYDRA.search(package)):
        refused.add(f"the package {package or name.rpartition('/')[0].replace('/', '.')}")
    defaults = content.get("defaults") if isinstance(content, dict) else None
    refused |= {f"the package of '{one}'" for one in _texts(defaults) if _HYDRA.search(one.partition("@")[2])}
    if refused:
        raise ConfigCompositionException(
            f"{name}.yaml sets {', '.join(sorted(refused))}, which can run code. A file may set "
            "hydra.sweeper.params and hydra.mode; put other settings of Hydra on the command line."
        )


def _texts(defaults: Any) -> list[str]:
    """The entries of a list of defaults, as texts."""
    entries = defaults if isinstance(defaults, list) else []
    return [text for one in entries for text in (map(str, one) if isinstance(one, dict) else [str(one)])]

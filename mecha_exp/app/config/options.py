"""The options of Hydra's groups: presets of block weights, lists for the help, the values of an option."""

from __future__ import annotations

import functools
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf

from mecha_exp.app.config.method_recipes import GROUP, PACKAGE, text_of
from mecha_exp.app.config.user_folder import USER_FOLDER, read_config
from mecha_exp.app.words.plain_data import as_written
from mecha_exp.graph.curves import PRESETS

CONFIG_MODULE = "mecha_exp.conf"

RESOLVER = "choices"
INDENT, WIDTH = 12, 100
BLOCKS = "blocks"


def register_presets() -> None:
    """Make each preset of block weights an option of `blocks`. Calling it twice does no harm."""
    for name in PRESETS:
        folder, _, last = f"{BLOCKS}/{name}".rpartition("/")  # `SMOOTHSTEP/2` is an option of a sub-group
        ConfigStore.instance().store(
            name=last, node={"preset": name}, group=folder, package=BLOCKS, provider="mecha_exp"
        )


def register_choices() -> None:
    """Let the help list a group with `${choices:recipe}`. Calling it twice does no harm."""
    OmegaConf.register_new_resolver(RESOLVER, choices, replace=True)


def choices(group: str) -> str:
    """The options of a group and of its sub-groups, wrapped for a second column."""
    return "\n".join(
        textwrap.wrap(
            ", ".join(_options(GlobalHydra.instance().config_loader(), group)),
            WIDTH - INDENT,
            subsequent_indent=" " * INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
    )


def option_values(group: str, name: str) -> dict[str, Any] | None:
    """The top-level values in the file of an option and in the files that it is based on.

    None if there is no such file, or if its values belong to a package.

    Raises:
        DocumentError: a file of the user's is not YAML, or goes beyond a limit.
    """
    if path := _file(group, name):
        package, config = read_config(path)
    elif group == GROUP and (text := text_of(name)) is not None:
        package, config = PACKAGE, OmegaConf.create(text)
    else:
        return None
    if package != PACKAGE:
        return None
    content = as_written(config)
    values: dict[str, Any] = {}
    for default in content.get("defaults", ()):
        if isinstance(default, str) and default != "_self_":
            values |= option_values(group, default) or {}
    return values | {key: value for key, value in content.items() if key != "defaults"}


def _file(group: str, name: str) -> Path | None:
    """The file of an option: the user's, or else ours."""
    folders = filter(None, (USER_FOLDER.get(), Path(str(files(CONFIG_MODULE)))))
    paths = (folder / group / f"{name}.yaml" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


@functools.lru_cache(maxsize=64)
def _options(loader: ConfigLoader, group: str) -> tuple[str, ...]:
    """The options by name, cached: every composed configuration asks for them, and Hydra parses each file."""
    names = loader.get_group_options(group, ObjectType.CONFIG)
    inner = loader.get_group_options(group, ObjectType.GROUP)
    nested = (f"{name}/{option}" for name in inner for option in _options(loader, f"{group}/{name}"))
    return tuple(sorted([*names, *nested]))

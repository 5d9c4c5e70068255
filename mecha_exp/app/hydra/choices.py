"""What can be chosen, for people to read: `${choices:recipe}` in the help lists the group's options."""

from __future__ import annotations

import functools
import textwrap

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf

RESOLVER = "choices"
INDENT, WIDTH = 12, 100


def register_choices() -> None:
    """Let configurations refer to the options of groups; twice does no harm."""
    OmegaConf.register_new_resolver(RESOLVER, choices, replace=True)


def choices(group: str) -> str:
    """The options of a group and of the groups in it, wrapped for a second column."""
    return "\n".join(
        textwrap.wrap(
            ", ".join(_options(GlobalHydra.instance().config_loader(), group)),
            WIDTH - INDENT,
            subsequent_indent=" " * INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
    )


@functools.lru_cache(maxsize=64)
def _options(loader: ConfigLoader, group: str) -> tuple[str, ...]:
    """They are asked for with every configuration that is composed, and each file is parsed for that."""
    names = loader.get_group_options(group, ObjectType.CONFIG)
    inner = loader.get_group_options(group, ObjectType.GROUP)
    nested = (f"{name}/{option}" for name in inner for option in _options(loader, f"{group}/{name}"))
    return tuple(sorted([*names, *nested]))

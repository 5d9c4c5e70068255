"""What can be chosen, for people to read: `${choices:recipe}` in the help lists the group's options."""

from __future__ import annotations

import textwrap

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
            ", ".join(_options(group)),
            WIDTH - INDENT,
            subsequent_indent=" " * INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
    )


def _options(group: str) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    names = loader.get_group_options(group, ObjectType.CONFIG)
    inner = loader.get_group_options(group, ObjectType.GROUP)
    return sorted([*names, *(f"{name}/{option}" for name in inner for option in _options(f"{group}/{name}"))])

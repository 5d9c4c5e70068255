"""The presets of block weights as options of the group `blocks`, so that `blocks=GRAD_V` is plain Hydra."""

from __future__ import annotations

import re

from hydra.core.config_store import ConfigStore

from mecha_exp.graph.curves import PRESETS

GROUP = "blocks"
ALL = "all_presets"

_LIST = re.compile(rf"{GROUP}=\[(?P<names>[^\[\]]*)\]")


def register_presets() -> None:
    """Make each preset an option; twice does no harm."""
    for name in PRESETS:
        folder, _, last = f"{GROUP}/{name}".rpartition("/")  # `SMOOTHSTEP/2` is an option of a sub-group
        ConfigStore.instance().store(
            name=last, node={"preset": name}, group=folder, package=GROUP, provider="mecha_exp"
        )


def expanded(word: str) -> str:
    """A word of the command line with what stands for several presets written out.

    >>> expanded("blocks=[GRAD_V, WRAP12]")
    'blocks=GRAD_V,WRAP12'
    """
    if word == f"{GROUP}={ALL}":
        return f"{GROUP}={','.join(PRESETS)}"
    if match := _LIST.fullmatch(word):
        return f"{GROUP}={','.join(name.strip() for name in match['names'].split(','))}"
    return word

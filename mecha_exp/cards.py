"""The model card of a folder, made by the package that announces it.

    [project.entry-points."mecha_exp.cards"]
    card = "mecha_exp.publishing.card:model_card"

The value is a function of a recipe and its `Settings` to the bytes of README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mecha_exp.engine import EngineOptions
from mecha_exp.entry_points import announced, load
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import Node

GROUP = "mecha_exp.cards"


@dataclass(frozen=True)
class Settings:
    """What decides a merge beside its recipe.

    Attributes:
        options: of the engine.
        dtype: of the output; None is that of each key in the first input.
        config: the configuration of another tool that the recipe was read from; empty for any other recipe.
        contents: the SHA-256 of each input by path; None reads the inputs.
    """

    options: EngineOptions = EngineOptions()  # noqa: RUF009, it is immutable
    dtype: torch.dtype | ByKey | None = None
    config: Mapping[str, Any] | None = None
    contents: Mapping[Path, str] | None = None


def card_of(recipe: Node, settings: Callable[[], Settings]) -> Callable[[], bytes] | None:
    """What makes the card of a recipe's model, once the merge begins; None where no package makes any."""
    entry = next(iter(announced(GROUP).values()), None)
    return None if entry is None else lambda: bytes(load(entry)(recipe, settings()))

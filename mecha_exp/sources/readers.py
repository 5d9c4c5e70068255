"""Readers: packages that know models which the core does not, such as adapters of PEFT.

A reader is found by an entry point of the group `mecha_exp.readers`, that of an installed package as those of
mecha_exp itself:

    [project.entry-points."mecha_exp.readers"]
    peft = "mecha_exp.peft.recipes:AdapterReader"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mecha_exp.checkpoint import open_stored
from mecha_exp.entry_points import announced, load
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node
from mecha_exp.method_api.views import Reading, View
from mecha_exp.sources.source import Source

GROUP = "mecha_exp.readers"


@dataclass(frozen=True)
class Prepared:
    """Recipes and their opened models, as they are merged.

    Attributes:
        recipes: the graphs.
        sources: the models.
        lines: about models that are read as something else.
    """

    recipes: tuple[Node, ...]
    sources: Mapping[ModelNode, Source]
    lines: tuple[str, ...] = ()


class Reader:
    """What a package reads. A hook that is not overridden leaves everything to others."""

    def opens(self, path: Path) -> bool:
        """Whether this reader opens a file or folder that a recipe names."""
        return False

    def open(self, path: Path) -> Source:
        """Open a file or folder. The `identity` of what is returned tells versions of it apart."""
        raise NotImplementedError

    def prepare(self, prepared: Prepared, on_tied: str) -> Prepared:
        """Put recipes in the place of models that stand for others, such as an adapter for base + delta."""
        return prepared

    def read(self, call: MergeNode, reading: Reading) -> View | None:
        """How a call is read, where this reader knows it better than its method."""
        return None


@cache
def readers() -> Sequence[Reader]:
    """The readers of all installed packages."""
    return [load(entry)() for entry in announced(GROUP).values()]


def opened(path: Path) -> Source:
    """Open the model that a recipe names: by the reader that opens it, or else as a stored model.

    Raises:
        CheckpointError: naming the file, the cause and the cure.
    """
    reader = next((reader for reader in readers() if reader.opens(path)), None)
    return open_stored(path) if reader is None else reader.open(path)

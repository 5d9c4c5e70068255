"""Readers: packages that know models which the core does not, such as adapters of PEFT.

A reader is found by an entry point of the group `mecha_exp.readers`, that of an installed package as those of
mecha_exp itself:

    [project.entry-points."mecha_exp.readers"]
    "adapter_config.json" = "mecha_exp.peft.recipes:AdapterReader"

A name with a dot is the end of the name of a file: the reader is loaded only for models with such a file. One
of another name is asked about every model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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

    def bases(self, recipe: Node, model_dirs: Sequence[Path]) -> Mapping[ModelNode, ModelNode]:
        """The models of a recipe that stand on others, such as adapters, with those."""
        return {}

    def with_scales(self, source: Source) -> Source:
        """A LoRA file with the scales of its modules that its metadata, of diffusers, names."""
        return source

    def describe(self, source: Source) -> Mapping[str, Any] | None:
        """What an adapter is, as plain data; see `inspection/model.py`. None for any other source."""
        return None


def readers(files: Iterable[Path] | None = None) -> Sequence[Reader]:
    """The readers of all installed packages; of those for certain files the ones that these need.

    Args:
        files: those of models; None is any.
    """
    names = None if files is None else [file.name for file in files]
    return [
        _reader(name)
        for name in announced(GROUP)
        if names is None or "." not in name or any(file.endswith(name) for file in names)
    ]


def readers_of(sources: Iterable[Source]) -> Sequence[Reader]:
    """The readers that models need."""
    return readers(file for source in sources for file in source.files)


@cache
def _reader(name: str) -> Reader:
    reader: Reader = load(announced(GROUP)[name])()
    return reader


def opened(path: Path) -> Source:
    """Open the model that a recipe names: by the reader that opens it, or else as a stored model.

    Raises:
        CheckpointError: naming the file, the cause and the cure.
    """
    reader = next((reader for reader in readers([path]) if reader.opens(path)), None)
    return open_stored(path) if reader is None else reader.open(path)

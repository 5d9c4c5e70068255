"""Opens the models of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from mecha_exp.errors import CheckpointError, Problems
from mecha_exp.graph.nodes import InMemory, ModelNode
from mecha_exp.sources.memory import MemorySource
from mecha_exp.sources.readers import opened
from mecha_exp.sources.search import find_model
from mecha_exp.sources.source import Source

Sources: TypeAlias = Mapping[ModelNode, Source]
"""Opened models, or views of them, by their leaves in recipes."""


@contextmanager
def open_sources(models: Sequence[ModelNode], folders: Sequence[Path]) -> Iterator[dict[ModelNode, Source]]:
    """Open every model, or raise one CheckpointError that names all that cannot be opened."""
    sources: dict[ModelNode, Source] = {}
    problems = Problems()
    try:
        for model in models:
            with problems.collected(CheckpointError):
                sources[model] = _open(model, folders)
        problems.raise_as(CheckpointError)
        yield dict(sources)
    finally:
        for source in sources.values():
            source.close()


def _open(model: ModelNode, folders: Sequence[Path]) -> Source:
    if isinstance(model.source, InMemory):
        return MemorySource(model.source)
    return opened(find_model(model.source, folders))

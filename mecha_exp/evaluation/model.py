"""Models as evaluators receive them: in a file or in memory, with quantised tensors as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mecha_exp.checkpoint import open_stored
from mecha_exp.graph.nodes import InMemory
from mecha_exp.sources.memory import MemorySource
from mecha_exp.sources.quantised.view import dequantised

Model = Path | Mapping[str, Tensor]


def load_state_dict(model: Model) -> Mapping[str, Tensor]:
    """Load a model from its file; a model in memory is returned as it is. A quantised one becomes numbers."""
    source = open_stored(model) if isinstance(model, Path) else MemorySource(InMemory(model))
    with source:
        plain = dequantised(source)
        if plain is source and not isinstance(model, Path):
            return model
        return {key: plain.read(key) for key in plain.keys()}

"""What an evaluator may know of the model that it measures, beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Context:
    """The point that is measured, for an evaluator with a parameter named `context`.

    Numbers are stored by the point's signature: they may depend on the inputs, the hyperparameters and the
    seed, which the signature covers, and not on the name or the folder.

    Attributes:
        name: of the point's folder, or of an input.
        hyperparameters: of the recipe, by name; empty for an input.
        seed: of the recipe's random numbers; None if it draws none, and for an input.
        folder: where files about the point may be written; None for an input.
        inputs: the files or folders of the models that were merged, by their names in tables, in the order
            of the recipe: a saved model has the configuration and the tokenizer of the first. Of an input its
            own comes first, then the others.
        offline: whether nothing may be downloaded.
    """

    name: str = ""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    folder: Path | None = None
    inputs: Mapping[str, Path] = field(default_factory=dict)
    offline: bool = True

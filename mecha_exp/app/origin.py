"""What a merged model says of its origin beside its recipe, so that it can be made again from itself alone.

The header of a safetensors file holds the recipe as text (`mecha_recipe`) and, as JSON (`mecha_origin`):

    inputs    the SHA-256 of each input, in the order in which the recipe names them
    engine    the engine's settings that change bits
    output    the output's settings, such as its dtype
    methods   the hash of each merge method's code
    versions  of mecha_exp and of torch
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mecha_exp
from mecha_exp.app.point import Point
from mecha_exp.checkpoint import Checkpoint
from mecha_exp.lab.signature import ENGINE_SETTINGS, Signature

KEY = "mecha_origin"
_PACKAGES = ("torch", "numpy")


@dataclass(frozen=True)
class Origin:
    """What decides a model's bytes beside its recipe.

    Attributes:
        inputs: the SHA-256 of each input, in the order of the recipe's models.
        engine: settings that change bits.
        output: settings of the output's tensors.
        methods: the hash of each merge method's code.
        versions: of the packages that compute.
    """

    inputs: Sequence[str]
    engine: Mapping[str, Any]
    output: Mapping[str, Any]
    methods: Mapping[str, str]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, point: Point, signature: Signature) -> Origin:
        """That of a point."""
        engine = {name: point.config["engine"].get(name) for name in ENGINE_SETTINGS}
        return cls(signature.inputs, engine, point.output_settings, signature.methods, versions())

    def text(self) -> str:
        """As a model's header holds it."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_file(cls, path: Path) -> Origin | None:
        """What a model says of itself; None where it says nothing, or nothing that can be read."""
        with Checkpoint(path) as file:
            text = file.header.metadata.get(KEY)
        try:
            return cls(**json.loads(text)) if text else None
        except (ValueError, TypeError):
            return None


def versions() -> dict[str, str]:
    """The versions of the packages that decide bits."""
    return {
        "mecha_exp": mecha_exp.__version__,
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
    }

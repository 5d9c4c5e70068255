"""The origin of a merged model in its header, from which the model can be made again.

The header of a safetensors file holds the recipe as text (`mecha_recipe`) and, as JSON (`mecha_origin`):

    inputs    the SHA-256 of each input, in the order in which the recipe names them, if they were looked at
    engine    the engine's settings that change bits
    output    the output's settings, such as its dtype
    methods   the hash of each merge method's code
    versions  of mecha_exp and of what computes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mecha_exp._version import __version__
from mecha_exp.checkpoint import open_stored
from mecha_exp.documents import newer, parse_json, typed
from mecha_exp.engine.code_hash import code_hashes
from mecha_exp.engine.options import SETTINGS, EngineOptions
from mecha_exp.errors import ConfigError, prefixed
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import InMemory, Node, models_of
from mecha_exp.recipe.files import METADATA_KEY
from mecha_exp.recipe.text import serialize
from mecha_exp.system.machine import installed

KEY = "mecha_origin"
PROVENANCE_KEYS = (METADATA_KEY, KEY)
"""The entries of a header that are wrong once the tensors change."""
_PACKAGES = ("torch", "numpy")


@dataclass(frozen=True)
class Origin:
    """Everything that decides a model's bytes beside its recipe.

    Attributes:
        inputs: the SHA-256 of each input, in the order of the recipe's models; none if not hashed.
        engine: settings that change bits.
        output: settings of the output's tensors.
        methods: the hash of each merge method's code.
        versions: of the packages that compute.
    """

    inputs: Sequence[str] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    output: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        recipe: Node,
        options: EngineOptions,
        dtype: torch.dtype | ByKey | None,
        quantize: str | None = None,
    ) -> Origin:
        """The origin of a merge's output."""
        output = {"dtype": _dtype_setting(dtype)} if dtype is not None else {}
        output |= {"quantize": quantize} if quantize is not None else {}
        return cls((), settings_of(options), output, code_hashes(recipe), versions())

    def text(self) -> str:
        """The JSON text for a model's header."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_file(cls, path: Path) -> Origin | None:
        """The origin in the header of a model; None where there is none.

        Raises:
            ConfigError: it is not what this version writes.
        """
        with open_stored(path) as model:
            text = model.metadata.get(KEY)
        with prefixed(f"{path}: {KEY} in its header: "):
            return cls.read(parse_json(text)) if text else None

    @classmethod
    def read(cls, content: Any) -> Origin:
        """The origin that a header or a record says.

        Raises:
            ConfigError: a part has another type than the class says, or is one of a newer version.
        """
        origin = typed(content, cls)
        if unknown := origin.engine.keys() - set(SETTINGS):
            raise ConfigError(f"engine: {newer(min(unknown))}")
        with prefixed("engine: "):
            typed(origin.engine, dict[str, str | None])
        return origin


def metadata_of(
    recipe: Node,
    options: EngineOptions,
    dtype: torch.dtype | ByKey | None = None,
    quantize: str | None = None,
) -> dict[str, str]:
    """The header of a merge's output; nothing of its origin where a model has no path to name."""
    if any(isinstance(model.source, InMemory) for model in models_of(recipe)):
        return {"format": "pt"}
    origin = Origin.of(recipe, options, dtype, quantize)
    return {"format": "pt", METADATA_KEY: serialize(recipe), KEY: origin.text()}


def settings_of(options: EngineOptions) -> dict[str, str]:
    """The options that change bits, in words."""
    return {name: str(getattr(options, name)).removeprefix("torch.") for name in SETTINGS}


def versions() -> dict[str, str]:
    """The versions of the packages that decide bits."""
    return {"mecha_exp": __version__, **installed(*_PACKAGES)}


def _dtype_setting(dtype: torch.dtype | ByKey) -> Any:
    return dict(dtype.words) if isinstance(dtype, ByKey) else str(dtype).removeprefix("torch.")

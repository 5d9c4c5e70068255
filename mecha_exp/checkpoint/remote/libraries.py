"""The libraries of stores, imported when an address needs them."""

from __future__ import annotations

import importlib
from typing import Any

from mecha_exp.errors import CheckpointError

_EXTRAS = {"gcsfs": "gs", "huggingface_hub": "hub", "s3fs": "s3"}


def library(name: str) -> Any:
    """A module that reads from a store.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(name, "remote")
        raise CheckpointError(
            f"models that lie elsewhere are read with {error.name}, which is not installed: "
            f"pip install 'mecha_exp[{extra}]'."
        ) from None

"""Networks that are not merged, which features and scores come from: checked by their headers."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.evaluators.common import ModelFolder, check_network


def changed_at(folder: Path) -> int:
    """When a file of a folder was changed last, for what is kept of it."""
    return max(file.stat().st_mtime_ns for file in folder.iterdir())


def check_frozen(folder: Path, kind: str, named: str) -> None:
    """Check that a folder has the weights of a network, and a row for each token; reads no weights.

    Args:
        folder: as `save_pretrained` writes it.
        kind: the class of transformers.
        named: what names the folder, for errors.

    Raises:
        ConfigError: it has not.
    """
    _check(folder, changed_at(folder), kind, named)


@lru_cache(maxsize=8)
def _check(folder: Path, changed: int, kind: str, named: str) -> None:
    try:
        with open_stored(folder) as model:
            shapes = {key: model.info(key).shape for key in model.keys()}
    except CheckpointError as error:
        raise ConfigError(f"{named}: its weights cannot be read: {error}") from None
    try:
        ModelFolder(folder).check_vocabulary(shapes)
        check_network(ModelFolder(folder), shapes, kind)
    except ConfigError as error:
        raise ConfigError(f"{named}: {error}") from None

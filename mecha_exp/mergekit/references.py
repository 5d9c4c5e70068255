"""The models that a configuration names: `PATH`, `ORG/NAME@REVISION`, `MODEL+LORA`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint import TensorInfo, open_stored
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.errors import ConfigError, brief
from mecha_exp.sources.layers import Layers
from mecha_exp.sources.search import find_model
from mecha_exp.sources.source import infos_of

_WORDS = {"model", "lora", "override_architecture"}


@dataclass(frozen=True)
class Reference:
    """A model as a configuration names it.

    Attributes:
        path: a path, or a name on the hub.
        revision: on the hub; None is the newest.
    """

    path: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.path}@{self.revision}" if self.revision else self.path


def read_reference(config: Any, where: str) -> Reference:
    """Read the name of a model, as a string or as mergekit writes it in full.

    Raises:
        ConfigError: it cannot be read, or names a LoRA or another architecture.
    """
    if isinstance(config, Mapping) and "model" in config and config.keys() <= _WORDS:
        if config.get("override_architecture"):
            raise ConfigError(f"{where}.override_architecture: the keys of a model decide here. Remove it.")
        _refuse_lora(config.get("lora"), where)
        return read_reference(config["model"], f"{where}.model")
    if isinstance(config, Mapping) and "path" in config and config.keys() <= {"path", "revision"}:
        return Reference(str(config["path"]), config.get("revision"))
    if not isinstance(config, str) or not config:
        raise ConfigError(f"{where}: expected the path or the name of a model, got {brief(config)}.")
    name, _, lora = config.partition("+")
    _refuse_lora(lora, where)
    path, _, revision = name.partition("@")
    if not path or "@" in revision:
        raise ConfigError(f"{where}: expected a model as PATH or ORG/NAME@REVISION, got {brief(config)}.")
    return Reference(path, revision or None)


def _refuse_lora(lora: Any, where: str) -> None:
    if lora:
        raise ConfigError(
            f"{where}: the adapter {brief(lora)} is of PEFT's format, which is not read here. Merge it into "
            "its model first (peft: merge_and_unload, save_pretrained) and name that folder."
        )


@dataclass(frozen=True)
class StoredModel:
    """A model of a configuration, on this machine.

    Attributes:
        source: its path in a recipe: that of the configuration, or of the snapshot in the hub's cache.
        path: its file or folder.
        infos: the dtype and the shape of every key.
    """

    source: str
    path: Path
    infos: Mapping[str, TensorInfo]

    @staticmethod
    def find(reference: Reference, folders: Sequence[Path], offline: bool) -> StoredModel:
        """Find a model in a folder or in the hub's cache, and read its header.

        Raises:
            CheckpointError: there is no such model, or its header cannot be read.
        """
        path = find_model(str(reference), folders, offline)
        with open_stored(path) as model:
            infos = infos_of(model)
        is_found_by_name = path.as_posix().removesuffix(SUFFIX).endswith(str(reference).removesuffix(SUFFIX))
        return StoredModel(str(reference) if is_found_by_name else str(path), path, infos)

    @cached_property
    def layers(self) -> Layers:
        """Its layers; CheckpointError where they cannot be told."""
        return Layers.of(self.infos, self.source, self.path)

"""The models that a configuration names: `PATH`, `ORG/NAME@REVISION`, `MODEL+LORA`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint import TensorInfo, open_stored
from mecha_exp.checkpoint.remote import is_address
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.checkpoint.sidecars import SmallFiles
from mecha_exp.errors import CheckpointError, ConfigError, brief, some
from mecha_exp.families import token_tables
from mecha_exp.graph.nodes import Node
from mecha_exp.numbers import is_number
from mecha_exp.peft.config import config_of
from mecha_exp.sources.layers import Layers
from mecha_exp.sources.search import find_model
from mecha_exp.sources.source import infos_of

_WORDS = {"model", "lora", "override_architecture"}
MODEL_WORDS = (
    "model",
    "base_model",
    "path",
    "revision",
    "lora",
    "source_model",
    "tokenizer_source",
    "source",
)
"""The words of configurations after which a model is named, or what is written as one is."""


@dataclass(frozen=True)
class Reference:
    """A model as a configuration names it.

    Attributes:
        path: a path, or a name on the hub.
        revision: on the hub; None is the newest.
        lora: the adapter of PEFT that is added to it, or None.
    """

    path: str
    revision: str | None = None
    lora: Reference | None = None

    def __str__(self) -> str:
        return f"{self.place}+{self.lora}" if self.lora else self.place

    @property
    def place(self) -> str:
        """The path with its revision, without the adapter."""
        return f"{self.path}@{self.revision}" if self.revision else self.path


def read_reference(config: Any, where: str) -> Reference:
    """Read the name of a model, as a string or as mergekit writes it in full.

    Raises:
        ConfigError: it cannot be read, or names another architecture.
    """
    if isinstance(config, Mapping) and "model" in config and config.keys() <= _WORDS:
        if config.get("override_architecture"):
            raise ConfigError(f"{where}.override_architecture: the keys of a model decide here. Remove it.")
        return _with_lora(
            read_reference(config["model"], f"{where}.model"), config.get("lora"), f"{where}.lora"
        )
    if isinstance(config, Mapping) and "path" in config and config.keys() <= {"path", "revision"}:
        revision = config.get("revision")
        return Reference(str(config["path"]), None if revision is None else str(revision))
    config = str(config) if is_number(config) else config
    if not isinstance(config, str) or not config:
        raise ConfigError(f"{where}: expected the path or the name of a model, got {brief(config)}.")
    name, plus, lora = config.partition("+")
    path, _, revision = name.partition("@")
    if not path or "@" in revision or (plus and not lora):
        raise ConfigError(
            f"{where}: expected a model as PATH, ORG/NAME@REVISION or MODEL+ADAPTER, got {brief(config)}."
        )
    return _with_lora(Reference(path, revision or None), lora, where)


def _with_lora(model: Reference, lora: Any, where: str) -> Reference:
    if not lora:
        return model
    adapter = read_reference(lora, where)
    if model.lora or adapter.lora:
        raise ConfigError(
            f"{where}: a model has one adapter here, got {brief(str(model))} and {brief(str(adapter))}. Name "
            "the model with each of them as an input of its own."
        )
    return replace(model, lora=adapter)


@dataclass(frozen=True)
class StoredModel:
    """A model of a configuration, on this machine.

    Attributes:
        source: its path in a recipe: that of the configuration, which may be an address, or of the snapshot
            in the hub's cache.
        path: its file or folder.
        infos: the dtype and the shape of every key.
        lora: the path of its adapter in a recipe; empty without one.
        lora_keys: those of its adapter.
        recipe: its graph, where it is a merge that is not written.
        small_files: the files that its folder would have in place of those of `path`; see `Job`.
        is_part: whether `infos` are those of one of its modules, of whose layers config.json may say nothing.
    """

    source: str
    path: Path
    infos: Mapping[str, TensorInfo]
    lora: str = ""
    lora_keys: tuple[str, ...] = ()
    recipe: Node | None = None
    small_files: SmallFiles = field(default_factory=dict)
    is_part: bool = False

    @staticmethod
    def find(reference: Reference, folders: Sequence[Path], offline: bool) -> StoredModel:
        """Find a model in a folder or in the hub's cache, and read its header and its adapter's.

        Raises:
            CheckpointError: there is no such model, its header cannot be read, or its adapter does not fit.
        """
        source, path = _find(reference, folders, offline)
        with open_stored(path) as model:
            infos = infos_of(model)
        if reference.lora is None:
            return StoredModel(source, path, infos)
        lora, adapter = _find(reference.lora, folders, offline)
        with open_stored(adapter) as opened:
            if config_of(opened) is None:
                raise CheckpointError(
                    f"{lora} is not an adapter of PEFT: it has no adapter_config.json. A model is an input "
                    "of its own."
                )
            keys = tuple(opened.keys())
        return StoredModel(source, path, infos, lora, keys)

    @cached_property
    def token_axes(self) -> Mapping[str, int]:
        """The keys that have an entry for each token, with the axis of the tokens."""
        return token_tables({key: info.shape for key, info in self.infos.items()})

    def require_movable_rows(self) -> None:
        """Check that the rows of tokens of a model can be moved.

        Raises:
            ConfigError: its adapter changes them, or it is a merge that is not written.
        """
        if self.recipe:
            raise ConfigError(
                f"tokenizer: rows of {self.source} would be moved, a merge of this file, and rows are moved "
                "of models that are read. Give its own document the tokenizer, or merge it first, by itself."
            )
        modules = [key.rpartition(".")[0] for key in self.token_axes]
        changed = [key for key in self.lora_keys if any(f".{module}." in f".{key}." for module in modules)]
        if changed:
            raise ConfigError(
                f"{self.source}+{self.lora}: the adapter changes rows of tokens ({some(changed, 3)}), which "
                "are moved here. Merge the adapter into its model first, and name the result."
            )

    @cached_property
    def layers(self) -> Layers:
        """The layers of the model; CheckpointError where they cannot be told."""
        return Layers.of(self.infos, self.source, None if self.recipe or self.is_part else self.path)

    def only(self, keys: Collection[str]) -> StoredModel:
        """The model as if it had these keys alone."""
        infos = {key: info for key, info in self.infos.items() if key in keys}
        return replace(self, infos=infos, is_part=True)


def _find(reference: Reference, folders: Sequence[Path], offline: bool) -> tuple[str, Path]:
    """The path of a model in a recipe, and on this machine."""
    path = find_model(reference.place, folders, offline)
    if is_address(reference.place):
        return reference.place, path
    is_found_by_name = path.as_posix().removesuffix(SUFFIX).endswith(reference.place.removesuffix(SUFFIX))
    return reference.place if is_found_by_name else str(path), path

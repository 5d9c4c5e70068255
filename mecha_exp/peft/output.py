"""Adapters of PEFT as the output of points: what a merge adds to its base, at a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from mecha_exp.app.outputs.makers import adapted
from mecha_exp.engine import EngineOptions
from mecha_exp.errors import ConfigError
from mecha_exp.peft.extraction import extract_adapter, require_rank
from mecha_exp.peft.writer import require_adapter_folder
from mecha_exp.sources.search import find_model

RANK = "rank"
"""The setting of an output that makes it an adapter: the name of the entry point."""
DEFAULT_FOLDER = "adapter"


@dataclass(frozen=True)
class AdapterOutput:
    """An adapter that a point writes.

    Attributes:
        path: its folder.
        base: the model that it is a difference to.
        rank: the largest of a module.
        modules_to_save, leave_out: see `extract_adapter`.
        options: the engine's options, with which the base gets the adapter to be measured.
    """

    path: Path
    base: Path
    rank: int
    modules_to_save: tuple[str, ...]
    leave_out: tuple[str, ...]
    options: EngineOptions

    @property
    def summary(self) -> str:
        """Its name and its rank."""
        return f"adapter  {self.path.name}, of rank {self.rank} at most"

    def write(self, merged: Mapping[str, Tensor]) -> dict[str, float]:
        """Write the adapter of a merged model; returns its rank and the relative error that this costs.

        Raises:
            CheckpointError: as `extract_adapter` raises it.
        """
        adapter = extract_adapter(
            merged,
            self.base,
            self.path,
            self.rank,
            modules_to_save=self.modules_to_save,
            leave_out=self.leave_out,
        )
        return {"adapter/rank": float(max(adapter.ranks.values())), "adapter/relative_error": adapter.error}

    def model(self, adapter: Path) -> dict[str, Tensor]:
        """The base with an adapter, in the dtypes of the base: what the adapter is measured as."""
        return adapted(self.base, adapter, self.options)

    def remade(self, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base with the adapter of a merged model, whose folder is gone and stays so.

        Raises:
            CheckpointError: as `extract_adapter` raises it.
        """
        with TemporaryDirectory() as temporary:
            again = replace(self, path=Path(temporary) / DEFAULT_FOLDER)
            again.write(merged)
            return again.model(again.path)


def adapter_output(config: Mapping[str, Any], folder: Path, options: EngineOptions) -> AdapterOutput:
    """The adapter that a configuration asks for.

    Args:
        config: the resolved configuration of a point.
        folder: the folder of the run; the adapter goes there unless output.path is set.

    Raises:
        ConfigError: a rank below 1, no base, or settings that an adapter does not have.
        CheckpointError: the base does not exist, or the path holds something other than an adapter.
    """
    output = config["output"]
    require_rank(output[RANK], "output.rank")
    base = output.get("base")
    if not isinstance(base, str):
        raise ConfigError(
            "output.base: an adapter is a difference to a base. Name the model with models.base=..."
        )
    if others := [name for name in ("quantize", "shard_size", "prune") if output.get(name)]:
        raise ConfigError(
            f"output.{others[0]}: an adapter is a file of factors in float32. Leave this out, or write a "
            "model with output=file."
        )
    if not output["save"]:
        raise ConfigError("output.save: an adapter is measured as it is written. output=none writes nothing.")
    path = Path(output["path"]).absolute() if output["path"] else folder.absolute() / DEFAULT_FOLDER
    require_adapter_folder(path)
    names = (_names(output, "modules_to_save"), _names(output, "leave_out"))
    return AdapterOutput(path, find_model(base, options.model_dirs), output[RANK], *names, options)


def _names(output: Mapping[str, Any], setting: str) -> tuple[str, ...]:
    value = output.get(setting) or ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"output.{setting}: expected a list of names, got {value!r}.")
    return tuple(names)

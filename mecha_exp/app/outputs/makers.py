"""Outputs that a package makes of a merged model, such as an adapter of a rank.

The name of the entry point is the setting of `output` that asks for it, and its value a function of the
configuration of a point, the folder of its run and the engine's options:

    [project.entry-points."mecha_exp.outputs"]
    rank = "mecha_exp.peft.output:adapter_output"
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mecha_exp.architectures.lora import LORA_DELTA
from mecha_exp.engine import EngineOptions, Job, merge_many
from mecha_exp.entry_points import announced, load
from mecha_exp.errors import ConfigError
from mecha_exp.graph.nodes import ModelNode, call

GROUP = "mecha_exp.outputs"


class OutputMaker(Protocol):
    """What is written in the place of a merged model, as a difference to a base."""

    @property
    def path(self) -> Path:
        """Where it goes."""

    @property
    def base(self) -> Path:
        """The model that it is a difference to."""

    @property
    def summary(self) -> str:
        """What it is, in words."""

    def write(self, merged: Mapping[str, Tensor]) -> dict[str, float]:
        """Write that of a merged model; returns numbers about it."""

    def model(self, output: Path) -> dict[str, Tensor]:
        """The model that an output stands for: what it is measured as."""

    def remade(self, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model that the output of a merged model stands for, without writing it."""


def setting_in(output: Mapping[str, Any]) -> str | None:
    """The setting of `output` that asks for another output than a model; None if none does."""
    return next((name for name in announced(GROUP) if name in output), None)


def output_maker(config: Mapping[str, Any], folder: Path, options: EngineOptions) -> OutputMaker | None:
    """What makes the output that a configuration asks for; None if its output is a model.

    Args:
        config: the resolved configuration of a point.
        folder: the folder of the run.
        options: the engine's options.

    Raises:
        ConfigError: no package makes an output with a base.
        MechaError: what is wrong with the settings.
    """
    name = setting_in(config["output"])
    if name is None and "base" in config["output"]:
        raise ConfigError("output: it is made of a merged model by a package that is not installed here.")
    maker: OutputMaker | None = load(announced(GROUP)[name])(config, folder, options) if name else None
    return maker


def adapted(base: Path, adapter: Path, options: EngineOptions) -> dict[str, Tensor]:
    """A base with what an adapter adds, in the dtypes of the base."""
    node = ModelNode(str(base))
    model: dict[str, Tensor] = {}
    merge_many([Job(node + call(LORA_DELTA, ModelNode(str(adapter)), node), model)], options)
    return model

"""Loads state dicts with transformers, and tells what does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mecha_exp.errors import ConfigError, some
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Shapes
from mecha_exp.evaluators.common.devices import (
    AUTO,
    check_memory,
    check_room,
    chosen_device,
    chosen_dtype,
)
from mecha_exp.evaluators.common.folders import ModelFolder
from mecha_exp.evaluators.common.libraries import calm, one_line
from mecha_exp.families import embeddings

Weights = Mapping[str, Tensor]
_GIVEN = ("num_classes", "pretrained")
_ANOTHER_FOLDER = "Name the folder of a model with the same keys and shapes with evaluator.model=PATH."


@dataclass(frozen=True)
class Loader:
    """Loads state dicts with transformers, by the names of its saved models.

    Attributes:
        folder: of the configuration.
        kind: a class of transformers, or `MODULE:CLASS` of a library that builds on it.
        dtype: of the network.
        settings: entries of the configuration to set.
        unused: starts of keys that may be there without being used.
        absent: starts of keys of the network that may be missing.
    """

    folder: ModelFolder
    kind: str
    dtype: torch.dtype
    settings: Mapping[str, Any]
    unused: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """What decides the network beside its weights."""
        content = {**self.folder.config, "_folder": str(self.folder.path) if self.folder.runs_code else ""}
        return json.dumps(
            [content, self.kind, str(self.dtype), dict(self.settings), self.unused, self.absent], default=str
        )

    def load(self, weights: Weights) -> nn.Module:
        """A module with these weights in evaluation mode, which shares their tensors where it can.

        Raises:
            ConfigError: they do not fit, or transformers does not know the configuration.
        """
        with calm(offline=True):
            config = self._config(weights)
            model_class = self._class(config)
            try:
                module, report = model_class.from_pretrained(
                    None,
                    config=config,
                    state_dict=dict(weights),
                    dtype=self.dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )
            except (RuntimeError, ValueError, KeyError, AttributeError) as error:
                name = f"{model_class.__name__} of {self.folder.path}"
                raise ConfigError(f"transformers cannot load the model as {name}: {error}") from error
        check_fit(
            f"{model_class.__name__} of {self.folder.path / 'config.json'}",
            missing=_without(report["missing_keys"], self.absent),
            unexpected=_without(report["unexpected_keys"], self.unused),
            mismatched=sorted(report["mismatched_keys"]),
        )
        return module.eval()  # type: ignore[no-any-return]

    def _config(self, weights: Weights) -> Any:
        from transformers import AutoConfig

        with one_line(f"transformers cannot read {self.folder.path / 'config.json'}"):
            config = AutoConfig.from_pretrained(
                self.folder.path, trust_remote_code=self.folder.runs_code, local_files_only=True
            )
        for name, value in self.settings.items():
            setattr(config, name, value)
        if getattr(config, "model_args", None):  # of timm: transformers gives these two by itself, too
            config.model_args = {k: v for k, v in config.model_args.items() if k not in _GIVEN}
        text = config.get_text_config()
        shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
        rows = [shapes[key][0] for key in embeddings(shapes)]
        if rows and getattr(text, "vocab_size", None) not in (None, rows[0]):
            text.vocab_size = rows[0]  # as it is changed in the folder of a merge that has resized it
        return config

    def _class(self, config: Any) -> Any:
        module, _, name = self.kind.rpartition(":")
        auto = getattr(import_module(module or "transformers"), name)
        if not hasattr(auto, "from_config"):
            return auto
        what = f"{self.folder.path} does not hold a model for {self.kind}"
        with one_line(what, (ValueError,)), torch.device("meta"):
            return type(auto.from_config(config, trust_remote_code=self.folder.runs_code))


def check_network(
    folder: ModelFolder,
    shapes: Shapes,
    kind: str,
    *,
    device: str = "cpu",
    dtype: str = AUTO,
    settings: Mapping[str, Any] | None = None,
    unused: tuple[str, ...] = (),
    absent: tuple[str, ...] = (),
    context: Context | None = None,
) -> nn.Module:
    """Check before a merge that weights of these shapes fit a model of transformers; reads no weights.

    The arguments are those of `network`, with shapes by key in place of tensors. In a context the bytes of
    `auto` are those of the first input, and the GPU of each worker must have room for them.

    Returns:
        the network, whose weights are zero.

    Raises:
        ConfigError: they do not, or the device is not there or too small.
    """
    place, number = chosen_device(device), chosen_dtype(dtype, {}, folder.config)
    # one number for all entries of a tensor: it takes no memory
    weights = {key: torch.zeros((), dtype=number).expand(shape) for key, shape in shapes.items()}
    module = Loader(folder, kind, number, settings or {}, unused, absent).load(weights)
    if context is None:
        check_memory(place, sum(tensor.numel() for tensor in weights.values()) * number.itemsize)
    else:
        check_room(device, shapes, dtype, context)
    return module


def _without(keys: Iterable[str], starts: tuple[str, ...]) -> list[str]:
    return sorted(key for key in keys if not (starts and key.startswith(starts)))


def check_fit(
    name: str, missing: list[str], unexpected: list[str], mismatched: list[Any], mend: str = _ANOTHER_FOLDER
) -> None:
    """Check that the tensors of a state dict are those of a network.

    Args:
        name: of the network.
        missing: keys of the network that the state dict lacks.
        unexpected: keys that have no place in the network.
        mismatched: keys with the shape that is there and the one that is expected.
        mend: what to do then, for the error.

    Raises:
        ConfigError: they are not.
    """
    problems = []
    if missing:
        problems.append(f"it lacks {some(missing, limit=3)}")
    if unexpected:
        problems.append(f"{some(unexpected, limit=3)} has no place in the network")
    for key, there, expected in mismatched[:3]:
        problems.append(f"{key} has shape {list(there)} instead of {list(expected)}")
    if problems:
        raise ConfigError(f"the model does not fit {name}: {'; '.join(problems)}. {mend}")

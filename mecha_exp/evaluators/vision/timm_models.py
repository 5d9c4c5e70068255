"""Folders of timm's models, whose `config.json` has the architecture, the labels and the preparation."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from mecha_exp.errors import ConfigError
from mecha_exp.evaluators.common import ModelFolder

CLASSIFIER, ENCODER = "TimmWrapperForImageClassification", "TimmWrapperModel"
"""The classes of transformers that hold a model of timm, with its head and without one."""
_PREPARATION = "pretrained_cfg"


def is_timm(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` was written by timm, or by transformers for a model of timm."""
    return isinstance(config.get(_PREPARATION), Mapping) and "architecture" in config


def kind_of(config: Mapping[str, Any]) -> str:
    """The class of transformers for a model of timm."""
    return CLASSIFIER if outputs_of(config) else ENCODER


def outputs_of(config: Mapping[str, Any]) -> int:
    """How many classes a model of timm tells apart; 0 without a head."""
    return int(config.get("num_classes", config[_PREPARATION].get("num_classes", 0)))


def width_of(network: Any) -> int:
    """The number of features that the last layer of a built model receives; `config.json` does not tell."""
    return int(network.timm_model.head_hidden_size)


def labels_of(config: Mapping[str, Any]) -> list[str] | None:
    """The names of the outputs; None where there are none."""
    names = config.get("label_names") or config[_PREPARATION].get("label_names")
    return [str(name) for name in names] if names else None


def size_of(config: Mapping[str, Any]) -> int | None:
    """The height and width of the pictures that a model of timm takes; None if it takes several."""
    prepared = config[_PREPARATION]
    return int(prepared["input_size"][-1]) if prepared.get("fixed_input_size") else None


def versions() -> dict[str, str]:
    """The versions of the libraries that compute with a model of timm."""
    return {name: version(name) for name in ("timm", "torchvision")}


def check_installed(folder: ModelFolder) -> None:
    """Check that timm can be imported, if a folder holds one of its models.

    Raises:
        ConfigError: it cannot.
    """
    if not is_timm(folder.config):
        return
    try:
        import_module("timm")
    except Exception as error:  # torchvision of another torch raises a RuntimeError
        raise ConfigError(
            f"{folder.path} holds a model of timm ({folder.config['architecture']}), and timm cannot be "
            f"imported: {error}. Install it beside a torchvision that fits this torch: pip install timm"
        ) from None

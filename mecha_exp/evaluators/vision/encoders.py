"""Networks that see pictures: classes of transformers, the features that they give, projections of CLIP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.evaluators.common import ModelFolder, frozen_folder
from mecha_exp.evaluators.vision import timm_models

CLASSIFIER = "AutoModelForImageClassification"
CLASSIFIES = "ForImageClassification"
"""How the classes of transformers end that classify pictures."""
_PROJECTION = "visual_projection.weight"


@dataclass(frozen=True)
class Encoder:
    """How features come out of the network of a folder.

    Attributes:
        folder: of its configuration.
        projection: the file of a CLIP whose projection a vision tower alone lacks; None without.
    """

    folder: ModelFolder
    projection: Path | None = None

    @property
    def kind(self) -> str:
        """The class of transformers: the one that the configuration names.

        Raises:
            ConfigError: it names none.
        """
        if timm_models.is_timm(self.folder.config):
            return timm_models.kind_of(self.folder.config)
        named = self.folder.config.get("architectures") or []
        if not named:
            raise ConfigError(
                f"{self.folder.path / 'config.json'} does not say which network it is of (architectures). "
                "Name the folder of a saved model with evaluator.model=PATH."
            )
        return str(named[0])

    @property
    def width(self) -> int | None:
        """The number of features; None where the configuration does not tell."""
        config = {**self.folder.config, **(self.folder.config.get("vision_config") or {})}
        if self.projection is not None:
            return int(self._projection().shape[0])
        if self.kind in ("CLIPModel", "CLIPVisionModelWithProjection"):
            return int(self.folder.config.get("projection_dim", 512))
        width = config.get("hidden_size")
        return width if isinstance(width, int) else None

    def features(self, network: Any, pixels: Tensor) -> Tensor:
        """The features [pictures, width] of pictures.

        The projected image of CLIP and its kin; what a model of timm gives to its last layer; otherwise what
        the network pools, or its first token.
        """
        if hasattr(network, "timm_model"):
            timm = network.timm_model
            given = timm.forward_head(timm.forward_features(pixels), pre_logits=True)
        elif hasattr(network, "get_image_features"):
            given = network.get_image_features(pixel_values=pixels)
        else:
            inner = network.base_model if type(network).__name__.endswith(CLASSIFIES) else network
            given = inner(pixel_values=pixels)
        features = _pooled(given)
        if self.projection is None:
            return features
        return F.linear(features.float(), self._projection().to(features.device))

    def _projection(self) -> Tensor:
        assert self.projection is not None
        return _projection(self.projection, self.projection.stat().st_mtime_ns)


def encoder_of(folder: ModelFolder, projection: str | None, offline: bool = True) -> Encoder:
    """The encoder of a folder.

    Args:
        folder: of its configuration.
        projection: a folder, a file or a hub's name of a CLIP whose projection it needs; None without.
        offline: whether nothing may be downloaded.

    Raises:
        ConfigError: the projection is not that of a CLIP, or the network has one already.
    """
    if projection is None:
        return Encoder(folder)
    encoder = Encoder(folder, frozen_folder(projection, "projection", offline))
    if encoder.kind != "CLIPVisionModel":
        raise ConfigError(
            f"evaluator.projection: {encoder.kind} of {folder.path} needs none: it is for a "
            "CLIPVisionModel, whose features have not the width of CLIP's text."
        )
    _ = encoder.width  # raises if there is none
    return encoder


def _pooled(given: Any) -> Tensor:
    """The features in an output of transformers."""
    if isinstance(given, Tensor):
        return given
    for name in ("image_embeds", "pooler_output"):
        pooled = getattr(given, name, None)
        if pooled is not None:
            return torch.flatten(pooled, 1)
    return given.last_hidden_state[:, 0]  # type: ignore[no-any-return]


@lru_cache(maxsize=2)
def _projection(path: Path, changed: int) -> Tensor:
    """CLIP's projection of images, [width of the text, width of the tower]."""
    try:
        with open_stored(path) as model:
            if _PROJECTION in model.keys():
                return model.read(_PROJECTION).float()
    except CheckpointError as error:
        raise ConfigError(f"evaluator.projection={path}: {error}") from None
    raise ConfigError(
        f"evaluator.projection={path}: there is no {_PROJECTION}, which a CLIPModel or a "
        "CLIPVisionModelWithProjection has."
    )


def names_of_outputs(config: Mapping[str, Any]) -> list[str] | None:
    """The names of a classifier's outputs; None where the configuration has numbers in their place."""
    if timm_models.is_timm(config):
        return timm_models.labels_of(config)
    labels = config.get("id2label")
    if not isinstance(labels, Mapping):
        return None
    names = [str(labels[key]) for key in sorted(labels, key=int)]
    return None if all(name == f"LABEL_{place}" for place, name in enumerate(names)) else names

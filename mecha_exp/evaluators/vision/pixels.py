"""Pictures as tensors, by the processor that lies beside a model; kept between points while there is room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mecha_exp.errors import ConfigError, some
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluators.common import ModelFolder, calm, named_folder, one_line
from mecha_exp.evaluators.vision import timm_models
from mecha_exp.evaluators.vision.image_data import ImageSet
from mecha_exp.families import CONFIG, PROCESSORS
from mecha_exp.system.cores import available_cores

_KEPT_BYTES = 2 << 30
"""Bytes of one task's tensors that are kept between points."""


def processor_file(folder: ModelFolder, context: Context, processor: str | None) -> Path:
    """The file that says how pictures become tensors: in a folder by name, or beside the configuration.

    A model of timm has it in its `config.json`.

    Raises:
        ConfigError: there is none.
    """
    inputs = [path if path.is_dir() else path.parent for path in context.inputs.values()]
    folders = [folder.path, *inputs]
    if processor:
        folders = [named_folder(processor, "processor", context.offline)]
    for candidate in folders:
        for name in PROCESSORS:
            if (candidate / name).is_file():
                return candidate / name
        if (candidate / CONFIG).is_file() and timm_models.is_timm(ModelFolder(candidate).config):
            return candidate / CONFIG
    searched = some(dict.fromkeys(map(str, folders)), limit=3)
    raise ConfigError(
        f"no {PROCESSORS[0]} lies in {searched}, so it is not known how pictures become tensors. Copy that "
        "of the pretrained model there, or name its folder with evaluator.processor=PATH."
    )


@dataclass
class Pixels:
    """The tensors of a set of pictures in batches.

    Attributes:
        images: the pictures.
        processor: of transformers.
        batch_size: pictures in a batch.
    """

    images: ImageSet
    processor: Any
    batch_size: int
    _kept: dict[range, Tensor] = field(default_factory=dict)
    _bytes: int = 0

    @property
    def batches(self) -> list[range]:
        """The places of the pictures of each batch."""
        places = range(len(self.images))
        return [places[start : start + self.batch_size] for start in places[:: self.batch_size]]

    def batch(self, places: range) -> Tensor:
        """The float32 tensor [pictures, channels, height, width] of a batch.

        Raises:
            ConfigError: a picture cannot be read, or the processor does not take it.
        """
        if places in self._kept:
            return self._kept[places]
        with ThreadPoolExecutor(max(1, min(8, available_cores()))) as pool:
            batch = self._tensor(list(pool.map(self.images.opened, places)))
        if self._bytes + batch.nbytes <= _KEPT_BYTES:
            self._kept[places] = batch
            self._bytes += batch.nbytes
        return batch

    def _tensor(self, pictures: list[Any]) -> Tensor:
        try:
            tensor: Tensor = self.processor(images=pictures, return_tensors="pt")["pixel_values"]
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"the image processor {type(self.processor).__name__} cannot prepare the pictures of "
                f"{self.images.path}: {error}"
            ) from None
        return tensor.to(torch.float32)


def check_batch_size(size: int) -> None:
    """Check that a batch has pictures.

    Raises:
        ConfigError: it has none.
    """
    if size < 1:
        raise ConfigError(f"evaluator.batch_size={size}: expected a whole number of at least 1.")


def pixels_of(images: ImageSet, file: Path, batch_size: int) -> Pixels:
    """The tensors of pictures, by the processor in a file's folder; one object for equal arguments."""
    return _pixels(images, file, file.stat().st_mtime_ns, batch_size)


@lru_cache(maxsize=32)
def _pixels(images: ImageSet, file: Path, changed: int, batch_size: int) -> Pixels:
    return Pixels(images, _processor(file, changed), batch_size)


@lru_cache(maxsize=8)
def _processor(file: Path, changed: int) -> Any:
    """The image processor of a folder, with Pillow alone; that of timm uses torchvision."""
    with calm(offline=True):
        from transformers import AutoImageProcessor

        make: Any = AutoImageProcessor
        errors = (OSError, ValueError, KeyError, ImportError)
        with one_line(f"transformers cannot make an image processor of {file}", errors):
            return make.from_pretrained(file.parent, backend="pil", local_files_only=True)


def expected_size(config: Mapping[str, Any]) -> int | None:
    """The height and width of the pictures that a configuration says; None if it does not."""
    if timm_models.is_timm(config):
        return timm_models.size_of(config)
    size = {**config, **(config.get("vision_config") or {})}.get("image_size")
    return size if isinstance(size, int) else None


def check_processor(sets: Iterable[ImageSet], config: Mapping[str, Any], file: Path) -> None:
    """Check by the first picture of each task that a processor makes what a network takes.

    Raises:
        ConfigError: it makes pictures of another size, or cannot prepare this one.
    """
    for images in sets:
        check_size(pixels_of(images, file, 1).batch(range(1)), config, file)


def check_size(tensor: Tensor, config: Mapping[str, Any], file: Path) -> None:
    """Check that a processor makes pictures of the size that a network takes.

    Raises:
        ConfigError: it does not.
    """
    size = expected_size(config)
    if size is not None and tuple(tensor.shape[-2:]) != (size, size):
        height, width = tensor.shape[-2:]
        raise ConfigError(
            f"{file} makes pictures of {height} x {width} pixels, and the model takes {size} x {size}. Name "
            "the folder of the processor that fits with evaluator.processor=PATH."
        )

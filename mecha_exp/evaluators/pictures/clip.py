"""Frozen CLIPs of transformers that look at pictures: cosines, preferences, features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError
from mecha_exp.evaluators.common import ModelFolder, calm, chosen_device, one_line
from mecha_exp.evaluators.vision.frozen import changed_at, check_frozen
from mecha_exp.evaluators.vision.texts import tokenizer_folder
from mecha_exp.families import PROCESSORS

if TYPE_CHECKING:
    from PIL.Image import Image

KIND, _TYPE = "CLIPModel", "clip"
_BATCH = 16


@dataclass(frozen=True)
class Seen:
    """What a CLIP makes of pictures and their prompts.

    Attributes:
        features: of the pictures, of norm 1, [pictures, width].
        cosines: between each picture and its prompt.
        scale: what the CLIP multiplies cosines by.
    """

    features: Tensor
    cosines: NDArray[np.float64]
    scale: float


@dataclass(frozen=True)
class Clip:
    """A CLIP in a folder, with its processor and its tokenizer.

    Attributes:
        folder: as `save_pretrained` writes it.
        key: the setting that names it.
    """

    folder: Path
    key: str

    @property
    def width(self) -> int:
        """The number of features of a picture."""
        return int(ModelFolder(self.folder).config.get("projection_dim", 512))

    @property
    def scale(self) -> float:
        """What it multiplies cosines by."""
        with open_stored(self.folder) as model:
            return float(model.read("logit_scale").double().exp())

    def check(self) -> None:
        """Check that the folder has a whole CLIP; reads no weights.

        Raises:
            ConfigError: it has not.
        """
        named = f"evaluator.{self.key}={self.folder}"
        if not (self.folder / "config.json").is_file():
            raise ConfigError(f"{named}: there is no config.json of a CLIP in this folder.")
        kind = ModelFolder(self.folder).config.get("model_type")
        if kind != _TYPE:
            raise ConfigError(
                f"{named}: config.json is of a model of type '{kind}', and only a CLIP of transformers "
                f"(model_type '{_TYPE}') compares pictures with prompts here."
            )
        if not any((self.folder / name).is_file() for name in PROCESSORS):
            raise ConfigError(
                f"{named}: there is no {PROCESSORS[0]}, so it is not known how pictures become tensors. Copy "
                "that of the pretrained CLIP there."
            )
        tokenizer_folder([self.folder], self.key)
        check_frozen(self.folder, KIND, named)

    def look(self, pictures: Sequence[Image], prompts: Sequence[str], device: str) -> Seen:
        """Compare each picture with its prompt.

        Raises:
            ConfigError: transformers cannot load the CLIP.
        """
        network, processor, tokenizer = _loaded(self.folder, changed_at(self.folder), self.key)
        network = network.to(chosen_device(device))
        length = network.config.text_config.max_position_embeddings
        features, texts = [], []
        with torch.inference_mode():
            for part in _batches(len(pictures)):
                pixels = processor(images=list(pictures[part]), return_tensors="pt").to(network.device)
                tokens = tokenizer(
                    list(prompts[part]), padding=True, truncation=True, max_length=length, return_tensors="pt"
                )
                given = network(**tokens.to(network.device), **pixels)
                features.append(given.image_embeds.cpu())
                texts.append(given.text_embeds.cpu())
            scale = float(network.logit_scale.exp())
        seen = torch.cat(features)
        cosines = F.cosine_similarity(seen.double(), torch.cat(texts).double(), dim=-1)
        return Seen(F.normalize(seen.float(), dim=-1), cosines.numpy(), scale)


def _batches(count: int) -> Iterator[slice]:
    for start in range(0, count, _BATCH):
        yield slice(start, start + _BATCH)


@lru_cache(maxsize=2)
def _loaded(folder: Path, changed: int, key: str) -> tuple[Any, Any, Any]:
    with calm(offline=True):
        import transformers

        made: Any = transformers
        with one_line(f"evaluator.{key}={folder}: transformers cannot load it"):
            network = made.CLIPModel.from_pretrained(folder, local_files_only=True).eval()
            processor = made.AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
            return network, processor, made.AutoTokenizer.from_pretrained(folder, local_files_only=True)

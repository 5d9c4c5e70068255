"""Draws pictures one after another; those of an interrupted start are recalled."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options
from mecha_exp.evaluators.common import ModelFolder
from mecha_exp.evaluators.pictures.pipelines import pipeline, scheduler_class
from mecha_exp.evaluators.pictures.shots import Shot, shots_of

Array = NDArray[np.uint8]
"""A picture, [height, width, 3]."""
ARGUMENTS = {
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "negative": "negative_prompt",
    "width": "width",
    "height": "height",
}
"""The arguments of a pipeline's call, by the settings for them."""


def given_of(options: Options) -> dict[str, str]:
    """The arguments that are not left to the pipeline, by the settings for them."""
    return {name: argument for name, argument in ARGUMENTS.items() if options[name] is not None}


@dataclass(frozen=True)
class Drawing:
    """What decides the pictures of a model; equal ones draw equal pictures.

    Attributes:
        folder: of the pipeline.
        shots: the pictures to make.
        component: the one that is merged; None for all.
        device: where the networks compute.
        dtype: of the networks.
        arguments: of the pipeline's call, by name.
    """

    folder: ModelFolder
    shots: tuple[Shot, ...]
    component: str | None
    device: str
    dtype: str
    arguments: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, options: Options, folder: ModelFolder) -> Drawing:
        """The drawing that the parameters of the evaluator ask for."""
        arguments = tuple((argument, options[name]) for name, argument in given_of(options).items())
        chosen = (options["component"], options["device"], options["dtype"])
        return cls(folder, shots_of(options), *chosen, arguments)

    def draw(
        self,
        weights: Mapping[str, Tensor],
        context: Context,
        work: str = "pictures",
        places: Sequence[int] | None = None,
    ) -> list[Array]:
        """The pictures of a model, in the order of the shots.

        Args:
            weights: by key.
            context: of the point; what is drawn lies beside the numbers that it keeps until all are there.
            work: the word for the pictures in the progress.
            places: of the shots to draw; None is all. What is drawn of some is recalled when all are drawn.

        Raises:
            EvaluationError: a picture has pixels that are not numbers.
        """
        drawn: dict[int, Array] = {}
        with ExitStack() as stack:
            made: list[Any] = []

            def draw(place: int) -> Array:
                if not made:
                    chosen = (self.component, self.device, self.dtype)
                    made.append(stack.enter_context(pipeline(self.folder, weights, *chosen)))
                drawn[place] = self._one(made[0], self.shots[place])
                return drawn[place]

            def kept(place: int) -> list[float]:
                return [_keep(draw(place), _file(context, work, place))]

            wanted = range(len(self.shots)) if places is None else places
            names = [str(place) for place in wanted]
            checksums = context.in_parts(work, wanted, kept, count=lambda place: 1, names=names)
            for place, checksum in zip(wanted, checksums, strict=True):
                if place not in drawn:
                    recalled = _recalled(_file(context, work, place), checksum)
                    drawn[place] = draw(place) if recalled is None else recalled
        return [drawn[place] for place in wanted]

    def of_model(self, weights: Mapping[str, Tensor], context: Context) -> list[Array]:
        """The pictures of a model; where it is one of the inputs, they are drawn once."""
        same = next((path for path in context.inputs.values() if _holds(path, weights)), None)
        pictures = [] if same is None else self._kept_of(same)
        if not pictures:
            pictures += self.draw(weights, context)
        return pictures

    def of_input(self, name: str, path: Path, context: Context) -> list[Array]:
        """The pictures of an input, which are drawn once."""
        pictures = self._kept_of(path)
        if not pictures:
            with open_stored(path) as model:
                weights = {key: model.read(key) for key in model.keys()}
            pictures += self.draw(weights, context, f"pictures of {name}")
        return pictures

    def _kept_of(self, path: Path) -> list[Array]:
        return _of_input(path, path.stat().st_mtime_ns, self)

    def _one(self, made: Any, shot: Shot) -> Array:
        own = made.scheduler
        made.scheduler = scheduler_class(shot.scheduler or type(own).__name__).from_config(own.config)
        try:
            noise = torch.Generator().manual_seed(shot.seed)
            given = made(prompt=shot.prompt, generator=noise, output_type="np", **dict(self.arguments))
        finally:
            made.scheduler = own
        picture = given.images[0]
        if not np.isfinite(picture).all():
            raise EvaluationError(
                f"the picture '{shot.name}' has pixels that are not numbers. Merge with smaller strengths, "
                "or, where the weights are float16, measure with evaluator.dtype=float32."
            )
        array: Array = (picture * 255).round().astype(np.uint8)
        return array


@lru_cache(maxsize=16)
def _of_input(path: Path, changed: int, drawing: Drawing) -> list[Array]:
    """A place for the pictures of an input."""
    return []


def _holds(path: Path, weights: Mapping[str, Tensor]) -> bool:
    """Whether an input has these weights: nearly always its first tensor tells."""
    with open_stored(path) as model:
        return model.keys() == weights.keys() and all(
            (there := model.read(key)).dtype == tensor.dtype and torch.equal(there, tensor)
            for key, tensor in weights.items()
        )


def _file(context: Context, work: str, place: int) -> Path | None:
    """Where a picture is kept until all of them are drawn."""
    if context.kept is None:
        return None
    return context.kept.with_name(f"{context.kept.name}.{zlib.crc32(work.encode()):08x}-{place}.png")


def _keep(array: Array, file: Path | None) -> float:
    """Keep a picture where that is asked for; returns the checksum of its file."""
    if file is None:
        return 0.0
    content = png(array)
    with suppress(OSError):  # then it is drawn again after an interrupt
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return float(zlib.crc32(content))


def _recalled(file: Path | None, checksum: list[float]) -> Array | None:
    """The picture that an earlier start kept; None where its file is not the one that was written."""
    from PIL import Image

    try:
        content = file.read_bytes() if file is not None else b""
    except OSError:
        return None
    if [float(zlib.crc32(content))] != checksum:
        return None
    with Image.open(io.BytesIO(content)) as picture:
        return np.asarray(picture)


def png(array: Array) -> bytes:
    """The PNG file of a picture."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(array).save(content, "PNG")
    return content.getvalue()

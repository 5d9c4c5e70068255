"""Which scores of pictures points can race by, and the best that a picture can have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mecha_exp.errors import ConfigError, EvaluationError, shortened
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options
from mecha_exp.evaluators.common.functions import function_file
from mecha_exp.evaluators.pictures.aesthetics import read_predictor
from mecha_exp.evaluators.pictures.scores import (
    AESTHETIC,
    CLIP,
    MOST,
    PREFERENCE,
    SCORER,
    Scores,
    clips_of,
    scored,
)
from mecha_exp.evaluators.pictures.shots import Shot

if TYPE_CHECKING:
    from PIL.Image import Image

_LEAVE = "or leave evaluator.race out."
_TRIED = 8
"""The pictures of noise that tell whether a scorer looks at each alone."""
_SIDE = 64  # pixels of one, where the pipeline decides the size
_ROUNDED = 1 + 1e-6
"""What the norm of float32 features is at most, and a cosine of them."""


def check_alone(options: Options, shots: Sequence[Shot]) -> None:
    """Check that there is a score of quality, which a picture has whichever others there are.

    A function of the user's own is tried on pictures of noise: all of them, and every other one.

    Raises:
        ConfigError: there is none, or the function gives a picture another number among fewer pictures.
    """
    if all(options[name] is None for name in (SCORER, CLIP, PREFERENCE)):
        raise ConfigError(
            "no score is asked for but the distance from the inputs' pictures, which says nothing about "
            "quality: a point would be dropped because it differs from its inputs. Give evaluator.clip, "
            f"evaluator.preference or evaluator.scorer, {_LEAVE}"
        )
    if options[SCORER] is None:
        return
    named = f"evaluator.{SCORER}={options[SCORER]}"
    prompts = tuple(shot.prompt for shot in islice(shots, _TRIED))
    size = options["width"] or _SIDE, options["height"] or _SIDE
    changed = function_file(options[SCORER], SCORER)[0].stat().st_mtime_ns
    try:
        among_all, among_fewer = _tried(options[SCORER], changed, prompts, *size)
    except EvaluationError as error:
        raise ConfigError(f"{named}: {error}") from None
    except Exception as error:  # of the user's code
        cause = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 300)
        raise ConfigError(
            f"{named} cannot be tried on pictures of noise of {size[0]} x {size[1]} pixels: {cause}. Mend "
            f"it, set evaluator.width and evaluator.height where it needs others, {_LEAVE}"
        ) from error
    if not np.allclose(among_all, among_fewer, rtol=1e-3, atol=1e-6, equal_nan=True):
        place = int(np.argmax(np.abs(among_all - among_fewer)))
        raise ConfigError(
            f"{named} gives a picture {among_all[place]:g} among {len(prompts)} pictures and "
            f"{among_fewer[place]:g} among {len(among_fewer)} of them, so it looks at all pictures together, "
            f"or draws at random: points race by a number for each picture alone. Mend it, {_LEAVE}"
        )


@lru_cache(maxsize=4)  # each point asks again
def _tried(
    scorer: str, changed: int, prompts: tuple[str, ...], width: int, height: int
) -> tuple[Scores, Scores]:
    """The numbers of every other picture of noise, among all of them and among themselves."""
    pictures = _noise(len(prompts), width, height)
    return scored(scorer, pictures, prompts)[1::2], scored(scorer, pictures[1::2], prompts[1::2])


def _noise(count: int, width: int, height: int) -> list[Image]:
    from PIL import Image

    drawn = np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(pixels) for pixels in drawn]


def best_score(context: Context, options: Options) -> float | None:
    """The best main score that a picture can have; None of a function of the user's own.

    A hundredfold cosine is at most 100, a preference at most the scale of its model, and an aesthetic score
    at most what the layers of its predictor make of features of norm 1.
    """
    clips = clips_of(options, context.offline)
    if options[SCORER] is not None:
        return None
    if PREFERENCE in clips:
        return clips[PREFERENCE].scale * _ROUNDED
    if options[AESTHETIC] is not None:
        return read_predictor(Path(options[AESTHETIC]).expanduser()).most(_ROUNDED)
    return MOST * _ROUNDED

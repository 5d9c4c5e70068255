"""Scores of pictures: by models in files, by the user's own function, by distances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mecha_exp.errors import ConfigError, EvaluationError
from mecha_exp.evaluation.declaration import Options
from mecha_exp.evaluators.common import frozen_folder
from mecha_exp.evaluators.common.functions import function_file, user_function
from mecha_exp.evaluators.pictures.aesthetics import read_predictor
from mecha_exp.evaluators.pictures.clip import Clip
from mecha_exp.evaluators.pictures.drawing import Array

if TYPE_CHECKING:
    from PIL.Image import Image

Scores = NDArray[np.float64]
Scorer = Callable[[Sequence["Image"], Sequence[str]], Sequence[float]]
SCORER, CLIP, AESTHETIC, PREFERENCE = "scorer", "clip", "aesthetic", "preference"
MOST = 100
"""What `clip_score` multiplies cosines by."""
_CLIPS = (CLIP, PREFERENCE)


def check_scores(options: Options, offline: bool) -> None:
    """Check the models and the function that score pictures, and that there is a score.

    Raises:
        ConfigError: one cannot be read, or is not for this; or there is none.
    """
    if not options["distances"] and all(options[n] is None for n in (SCORER, CLIP, PREFERENCE)):
        raise ConfigError(
            "evaluator.distances=false leaves no score: give evaluator.clip, evaluator.preference or "
            "evaluator.scorer."
        )
    for clip in clips_of(options, offline).values():
        clip.check()
    if options[AESTHETIC] is not None:
        _check_aesthetic(options, offline)
    if options[SCORER] is not None:
        user_function(options[SCORER], SCORER)


def _check_aesthetic(options: Options, offline: bool) -> None:
    predictor = read_predictor(Path(options[AESTHETIC]).expanduser())
    if (clip := clips_of(options, offline).get(CLIP)) is None:
        raise ConfigError(
            f"evaluator.{AESTHETIC} reads the features of a CLIP: name the one that it was trained for with "
            "evaluator.clip=FOLDER."
        )
    if predictor.width != clip.width:
        raise ConfigError(
            f"evaluator.{AESTHETIC}={options[AESTHETIC]} reads {predictor.width} features, and the CLIP in "
            f"{clip.folder} gives {clip.width}. Name the CLIP that it was trained for with evaluator.clip."
        )


def score_files(options: Options, offline: bool) -> list[Path]:
    """The files that decide scores, which count by their content."""
    folders = [clip.folder for clip in clips_of(options, offline).values()]
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.is_file()]
    if options[AESTHETIC] is not None:
        files.append(Path(options[AESTHETIC]).expanduser())
    if options[SCORER] is not None:
        files.append(function_file(options[SCORER], SCORER)[0])
    return files


def scores_of(
    pictures: Sequence[Image], prompts: Sequence[str], options: Options, offline: bool
) -> dict[str, Scores]:
    """The scores of pictures by name; more is better, and the first one is the main one.

    Raises:
        EvaluationError: the user's function does not give a number for each picture.
    """
    scores: dict[str, Scores] = {}
    clips = clips_of(options, offline)
    if options[SCORER] is not None:
        scores[SCORER] = scored(options[SCORER], pictures, prompts)
    if PREFERENCE in clips:
        seen = clips[PREFERENCE].look(pictures, prompts, options["device"])
        scores[PREFERENCE] = seen.scale * seen.cosines
    if CLIP in clips:
        seen = clips[CLIP].look(pictures, prompts, options["device"])
        if options[AESTHETIC] is not None:
            scores[AESTHETIC] = read_predictor(Path(options[AESTHETIC]).expanduser()).scores(seen.features)
        scores["clip_score"] = np.maximum(MOST * seen.cosines, 0)
    return scores


def distance(a: Array, b: Array) -> float:
    """The root mean square of the differences of the pixels of two pictures, 0 to 255."""
    return float(np.sqrt(np.square(a.astype(np.float64) - b.astype(np.float64)).mean()))


def clips_of(options: Options, offline: bool) -> dict[str, Clip]:
    """The CLIPs that are named, by the settings for them."""
    named = {key: options[key] for key in _CLIPS if options[key] is not None}
    return {key: Clip(frozen_folder(name, key, offline), key) for key, name in named.items()}


def scored(named: str, pictures: Sequence[Image], prompts: Sequence[str]) -> Scores:
    """The numbers that the user's function gives to pictures.

    Raises:
        EvaluationError: it does not give a number for each.
    """
    scorer: Scorer = user_function(named, SCORER)
    scores = np.asarray(scorer(pictures, prompts), dtype=np.float64)
    if scores.shape != (len(pictures),):
        raise EvaluationError(
            f"the scorer gave {scores.size} numbers for {len(pictures)} pictures: expected one for each."
        )
    return scores

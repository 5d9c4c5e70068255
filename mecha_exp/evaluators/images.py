"""The evaluator of diffusion models: pictures of each point for fixed prompts and seeds, and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options, Shapes
from mecha_exp.evaluation.measurement import Measurement
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import evaluator
from mecha_exp.evaluators.common.devices import check_room
from mecha_exp.evaluators.pictures.components import check_components, networks_of
from mecha_exp.evaluators.pictures.drawing import Drawing, given_of, png
from mecha_exp.evaluators.pictures.pipelines import check_pipeline, pipeline_folder, scheduler_class
from mecha_exp.evaluators.pictures.racing import best_score, check_alone
from mecha_exp.evaluators.pictures.scores import SCORER, check_scores, distance, score_files, scores_of
from mecha_exp.evaluators.pictures.shots import shots_of

__all__ = ["images"]

TASK = "pictures"
"""The name of the one task, whose examples are the pictures."""
DISTANCE = "distance"
_DTYPES = ("auto", "float32", "float16", "bfloat16")


def _check(shapes: Shapes, context: Context, options: Options) -> None:
    """Check prompts, pipeline, device and scores before anything is merged."""
    shots, folder = shots_of(options), pipeline_folder(context, options["model"])
    if options["dtype"] not in _DTYPES:
        raise ConfigError(f"evaluator.dtype={options['dtype']}: expected one of {', '.join(_DTYPES)}.")
    if options["steps"] < 1:
        raise ConfigError(f"evaluator.steps={options['steps']}: expected at least 1.")
    for name in dict.fromkeys(shot.scheduler for shot in shots if shot.scheduler):
        scheduler_class(name)
    check_pipeline(folder, given_of(options))
    check_components(folder, shapes, options["component"])
    check_room(options["device"], shapes, options["dtype"], context)
    check_scores(options, context.offline)


def _check_examples(shapes: Shapes, context: Context, options: Options) -> None:
    """Check that there is a score of quality for each picture alone, and several prompts."""
    shots = shots_of(options)
    if len({shot.prompt for shot in shots}) < 2:
        raise ConfigError(
            "pictures of one prompt stay together, and there is one prompt: no point could be dropped before "
            "it has all pictures. List more prompts, or leave evaluator.race out."
        )
    check_alone(options, shots)


def _depends(context: Context, options: Options) -> dict[str, Any]:
    folder = pipeline_folder(context, options["model"])
    component = options["component"]
    rest = [part for part in networks_of(folder) if part.name != component] if component else []
    return {
        "prompts": [shot.prompt for shot in shots_of(options)],
        "pipeline": folder.contents,
        "files": [*(file for part in rest for file in part.files), *score_files(options, context.offline)],
        "inputs": list(context.inputs.values()) if options["distances"] else [],
    }


@evaluator(
    "images",
    metric="score",
    units={"clip_score": "100 times the cosine", "preference": "the cosine times the model's scale"},
    libraries=("diffusers", "transformers", "PIL"),
    extra="images",
    check=_check,
    depends=_depends,
    takes_examples=True,
    check_examples=_check_examples,
    best_outcome=best_score,
)
def images(
    state_dict: Mapping[str, Tensor],
    *,
    prompts: str | Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    schedulers: Sequence[str] | None = None,
    steps: int = 20,
    guidance: float | None = 7.5,
    negative: str | None = None,
    width: int | None = None,
    height: int | None = None,
    clip: str | None = None,
    aesthetic: str | None = None,
    preference: str | None = None,
    scorer: str | None = None,
    distances: bool = True,
    component: str | None = None,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    context: Context | None = None,
    examples: Mapping[str, list[int]] | None = None,
) -> Measurement:
    """Make pictures of prompts with a pipeline of diffusers, one for each seed and scheduler, and score them.

    Args:
        state_dict: the weights, under the names of a pipeline's folder (`unet.conv_in.weight`).
        prompts: a file with one on each line, or a list.
        seeds: of the noise, which is drawn on the CPU.
        schedulers: names of classes of diffusers; None is the pipeline's own.
        steps: of each scheduler.
        guidance: the scale of classifier-free guidance; None is the pipeline's own.
        negative: a negative prompt.
        width, height: in pixels; None is the pipeline's own.
        clip: the folder of a CLIP, which gives `clip_score`.
        aesthetic: a file with linear layers over the features of `clip`, which gives `aesthetic`.
        preference: the folder of a CLIP that was trained to prefer pictures as people do, such as PickScore,
            which gives `preference`: the cosine of picture and prompt times the model's scale.
        scorer: `FILE.py:function`, a function of pictures (Pillow) and prompts to a number each.
        distances: whether the inputs' pictures are made, too, and `distance/INPUT` is measured: the root mean
            square of the differences of pixels, 0 to 255.
        component: the component whose weights the state dict holds, such as `unet`; None is all.
        model: the folder of another pipeline than the first input's.
        device, dtype: of the networks; `auto` is a GPU where there is one, and the dtype of the weights.
        context: the inputs.
        examples: the positions of the pictures to make, as those of the task `pictures`, which have their
            scores and no distances; None is all.

    Returns:
        the pictures as files, and a score for each: the scorer's, else the preference, the aesthetic score,
        CLIP's, or else minus the mean distance from the inputs' pictures. Pictures of one prompt are a
        cluster.

    Raises:
        ConfigError: pipeline, weights, prompts and scores do not fit together.
        EvaluationError: a picture has pixels that are not numbers.
    """
    context = context or Context()
    options = {**locals()}
    from PIL import Image

    shots, drawing = shots_of(options), Drawing.of(options, pipeline_folder(context, model))
    if examples is not None:
        shots = tuple(shots[place] for place in examples[TASK])
        arrays = drawing.draw(state_dict, context, places=examples[TASK])
    else:
        arrays = (drawing.of_model if distances else drawing.draw)(state_dict, context)
    words = [shot.prompt for shot in shots]
    scores = scores_of([Image.fromarray(array) for array in arrays], words, options, context.offline)
    metrics = {name: float(values.mean()) for name, values in scores.items() if name != SCORER}
    if distances and examples is None:
        rows = {}
        for name, path in context.inputs.items():
            theirs = drawing.of_input(name, path, context)
            rows[name] = np.array([distance(a, b) for a, b in zip(arrays, theirs, strict=True)])
        metrics |= {f"distance/{name}": float(row.mean()) for name, row in rows.items()}
        scores[DISTANCE] = -np.mean([*rows.values()], axis=0)
    names = [shot.name for shot in shots]
    files = {f"{name}.png": png(array) for name, array in zip(names, arrays, strict=True)}

    def by_picture(values: NDArray[np.float64]) -> Outcomes:
        return Outcomes({TASK: values}, examples={TASK: names}, clusters={TASK: words})

    name, main = next(iter(scores.items()))
    if name != DISTANCE:
        return Measurement(metrics, by_picture(main), files)
    # A number to sort by, which tells nothing of quality: without outcomes of it nothing is concluded.
    metrics |= {"score": float(main.mean()), DISTANCE: -float(main.mean())}
    return Measurement(metrics, None, files, {DISTANCE: by_picture(-main)})

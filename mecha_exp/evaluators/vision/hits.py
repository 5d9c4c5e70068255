"""Counts hits: which pictures of each task a network classifies rightly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import evaluator
from mecha_exp.evaluators.common import ModelFolder
from mecha_exp.evaluators.vision import timm_models
from mecha_exp.evaluators.vision.image_data import (
    TEST,
    VALIDATION,
    Division,
    ImageSet,
    image_files,
    image_set,
    task_paths,
)
from mecha_exp.evaluators.vision.pixels import Pixels, check_batch_size, check_size, pixels_of

image_evaluator = partial(
    evaluator,
    metric="accuracy",
    splits=(VALIDATION, TEST),
    units={"accuracy": "fraction of the pictures, mean over tasks"},
    libraries=("transformers", "PIL"),
    extra="vision",
    takes_examples=True,
    fidelities=("limit",),
)
"""The decorator of an evaluator that returns `hits`."""


def image_sets(options: Options, split: str) -> dict[str, ImageSet]:
    """The pictures of each task on a split, or some `examples` of them, by the parameters of an evaluator.

    Raises:
        ConfigError: there are none, or the parameters are not in their ranges.
    """
    division = Division(options["validation_share"], options["split_seed"], options["limit"])
    paths, examples = task_paths(options["data"], options["tasks"]), options.get("examples")
    if examples is None:
        return {task: image_set(task, path, split, division) for task, path in paths.items()}
    return {task: image_set(task, paths[task], split, division).among(p) for task, p in examples.items()}


def what_decides(options: Options, folder: ModelFolder, *files: Path) -> dict[str, Any]:
    """What decides the hits beside code and parameters: configurations, and files by content."""
    paths = task_paths(options["data"], options["tasks"])
    pictures = {task: image_files(path) for task, path in paths.items()}
    timm = timm_models.versions() if timm_models.is_timm(folder.config) else {}
    return {"model": folder.contents, "pictures": pictures, "files": list(files), **timm}


def check_pictures(options: Options) -> dict[str, ImageSet]:
    """Check that every task has pictures on both splits; returns those of the test split.

    Raises:
        ConfigError: one has none, or the size of batches is not a number.
    """
    check_batch_size(options["batch_size"])
    image_sets(options, VALIDATION)
    return image_sets(options, TEST)


def hits(
    sets: Mapping[str, ImageSet],
    processor: Path,
    config: Mapping[str, Any],
    batch_size: int,
    logits: Callable[[str, Tensor], Tensor],
    places: Mapping[str, NDArray[np.int64]],
    context: Context,
) -> Outcomes:
    """Which pictures are classified rightly, by task.

    Args:
        sets: the pictures by task.
        processor: the file of the processor.
        config: of the network.
        batch_size: pictures in a batch.
        logits: a function of a task and a batch of pixels to [pictures, outputs].
        places: by task, the output that stands for each class.
        context: of the model.

    Raises:
        EvaluationError: a logit is NaN or infinite.
    """
    values, examples = {}, {}
    for task, images in sets.items():
        pixels = pixels_of(images, processor, batch_size)

        def chosen(batch: range, task: str = task, pixels: Pixels = pixels) -> list[float]:
            tensor = pixels.batch(batch)
            check_size(tensor, config, processor)
            scores = logits(task, tensor)
            _check_finite(task, scores)
            return scores.argmax(dim=1).tolist()

        classes = context.in_parts(f"pictures of {task}", pixels.batches, chosen)
        values[task] = np.concatenate(classes) == places[task][images.labels]
        examples[task] = list(images.examples)
    return Outcomes(values, examples=examples)


def _check_finite(task: str, logits: Tensor) -> None:
    """Check that all logits are numbers.

    Raises:
        EvaluationError: they are not.
    """
    broken = int((~logits.isfinite().all(dim=1)).sum())
    if broken:
        raise EvaluationError(
            f"the model gives NaN or infinite logits for {broken} of {len(logits)} pictures of '{task}', so "
            "they have no class. Merge with smaller strengths, or, where the weights are float16, measure "
            "with evaluator.dtype=float32."
        )

"""The evaluator of image classifiers, and of encoders with heads that are not merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options, Shapes
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluators.common import ModelFolder, check_network, folder_of, network
from mecha_exp.evaluators.vision import timm_models
from mecha_exp.evaluators.vision.encoders import CLASSIFIER, CLASSIFIES, encoder_of, names_of_outputs
from mecha_exp.evaluators.vision.heads import (
    Head,
    Words,
    check_width,
    files_in,
    head_files,
    listed,
    output_places,
    read_head,
)
from mecha_exp.evaluators.vision.hits import check_pictures, hits, image_evaluator, image_sets, what_decides
from mecha_exp.evaluators.vision.image_data import ImageSet, task_paths
from mecha_exp.evaluators.vision.pixels import check_processor, processor_file

__all__ = ["image_classification"]


def _heads(options: Options, tasks: Mapping[str, Any]) -> dict[str, Head]:
    files = head_files(options["heads"], list(tasks))
    return {task: read_head(task, file) for task, file in files.items()}


def _check(shapes: Shapes, context: Context, options: Options) -> None:
    """Check pictures, processor, heads and network before anything is merged."""
    folder = folder_of(context, options)
    timm_models.check_installed(folder)
    sets = check_pictures(options)
    file = processor_file(folder, context, options["processor"])
    kind = CLASSIFIER
    if options["heads"] is None:
        if not (architecture := encoder_of(folder, None).kind).endswith(CLASSIFIES):
            raise ConfigError(
                f"{folder.path} holds a {architecture}, which does not classify pictures by itself. Name "
                "heads for its features with evaluator.heads, or use evaluator=clip_zero_shot."
            )
        if options["projection"] is not None:
            raise ConfigError(
                "evaluator.projection: without heads a classifier is measured, which uses none."
            )
        _places(sets, options, lambda task: _outputs(folder.config), folder)
    else:
        encoder = encoder_of(folder, options["projection"], context.offline)
        kind, heads = encoder.kind, _heads(options, sets)
        for task, head in heads.items():
            if encoder.width is not None:
                check_width(task, head, encoder.width, f"{kind} of {folder.path}")
        _places(sets, options, lambda task: len(heads[task].weight), folder)
    network = check_network(
        folder, shapes, kind, device=options["device"], dtype=options["dtype"], context=context
    )
    check_processor(sets.values(), folder.config, file)
    if options["heads"] is not None and timm_models.is_timm(folder.config):
        for task, head in heads.items():
            check_width(task, head, timm_models.width_of(network), f"{kind} of {folder.path}")


def _outputs(config: Mapping[str, Any]) -> int:
    """How many outputs a classifier has."""
    if timm_models.is_timm(config):
        return timm_models.outputs_of(config)
    return len(config.get("id2label") or ()) or int(config.get("num_labels", 2))


def _places(
    sets: Mapping[str, ImageSet], options: Options, outputs: Callable[[str], int], folder: ModelFolder
) -> dict[str, Any]:
    """The output that stands for each class, by task."""
    places = {}
    for task, images in sets.items():
        names = listed(options["classes"], task, "classes")
        source = f"the classifier of {folder.path}" if options["heads"] is None else f"the head of '{task}'"
        if names is None and options["heads"] is None:
            names = names_of_outputs(folder.config)
        order = list(names) if names is not None else None
        places[task] = output_places(images, outputs(task), order, source)
    return places


def _depends(context: Context, options: Options) -> dict[str, Any]:
    folder = folder_of(context, options)
    tasks = list(task_paths(options["data"], options["tasks"]))
    files = [processor_file(folder, context, options["processor"]), *files_in(options["classes"], tasks)]
    if options["heads"] is not None:
        files += head_files(options["heads"], tasks).values()
        if encoder := encoder_of(folder, options["projection"], context.offline).projection:
            files.append(encoder)
    return what_decides(options, folder, *files)


@image_evaluator("image_classification", check=_check, depends=_depends)
def image_classification(
    state_dict: Mapping[str, Tensor],
    *,
    data: str | None = None,
    tasks: Sequence[str] | Mapping[str, str] | None = None,
    heads: str | Mapping[str, str] | None = None,
    classes: Words = None,
    validation_share: float | None = None,
    split_seed: int = 0,
    limit: int | None = None,
    model: str | None = None,
    processor: str | None = None,
    projection: str | None = None,
    batch_size: int = 32,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    split: str = "validation",
    context: Context | None = None,
    examples: Mapping[str, list[int]] | None = None,
) -> Outcomes:
    """Measure a classifier of pictures, or an encoder with heads that are not merged, on one task or many.

    Args:
        state_dict: the weights, under the names of a saved model of transformers.
        data: the folder with the pictures of a task, or with the folders of the tasks; see `image_data`.
        tasks: the names of the tasks, or names with paths; None is one task.
        heads: safetensors files by task, a folder of them, or one file with `TASK.weight`: linear heads with
            `weight` [classes, width] and `bias` [classes], or CLIP's text features without a bias. None: the
            model is a classifier.
        classes: the class folders in the order of the outputs: a list or a file, or these by task. None: by
            the labels in the configuration, or in the order of the folders' names.
        validation_share: the share of each class that is validation, where the data have not both splits.
        split_seed: of that division.
        limit: at most so many pictures of a task.
        model: a folder with another configuration than that beside the inputs.
        processor: a folder with another image processor.
        projection: a CLIP whose projection a `CLIPVisionModel` alone lacks.
        batch_size: pictures in a batch.
        device: where the network computes: `cpu`, `cuda`, `cuda:1`; `auto` is a GPU where there is one.
        dtype: of the network: `auto` is that of the weights.
        trust_remote_code: whether code in the model's folder may run.
        split: `validation` or `test`.
        context: the inputs.
        examples: the positions of the pictures to measure, by task; None is all.

    Returns:
        For each picture of each task 1 if it is classified rightly, else 0.

    Raises:
        ConfigError: pictures, heads, processor and network do not fit together.
        EvaluationError: a logit is NaN or infinite.
    """
    context = context or Context()
    options = {**locals()}
    folder = folder_of(context, options)
    sets = image_sets(options, split)
    file = processor_file(folder, context, processor)
    if heads is None:
        with network(folder, state_dict, CLASSIFIER, device=device, dtype=dtype) as classifier:
            places = _places(sets, options, lambda task: int(classifier.config.num_labels), folder)

            def own(task: str, pixels: Tensor) -> Tensor:
                pixels = pixels.to(classifier.device, classifier.dtype)
                logits: Tensor = classifier(pixel_values=pixels).logits
                return logits

            return hits(sets, file, folder.config, batch_size, own, places, context)
    encoder, frozen = encoder_of(folder, projection, context.offline), _heads(options, sets)
    places = _places(sets, options, lambda task: len(frozen[task].weight), folder)
    with network(folder, state_dict, encoder.kind, device=device, dtype=dtype) as tower:

        def projected(task: str, pixels: Tensor) -> Tensor:
            features = encoder.features(tower, pixels.to(tower.device, tower.dtype))
            check_width(task, frozen[task], features.shape[1], f"{encoder.kind} of {folder.path}")
            return frozen[task].logits(features)

        return hits(sets, file, folder.config, batch_size, projected, places, context)

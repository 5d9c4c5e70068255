"""The evaluator of CLIP by class names: no head is trained or merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options, Shapes
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluators.common import ModelFolder, check_network, folder_of, frozen_folder, network
from mecha_exp.evaluators.vision.encoders import encoder_of
from mecha_exp.evaluators.vision.frozen import changed_at
from mecha_exp.evaluators.vision.heads import Head, Words, check_width, files_in, output_places
from mecha_exp.evaluators.vision.hits import check_pictures, hits, image_evaluator, image_sets, what_decides
from mecha_exp.evaluators.vision.image_data import ImageSet, task_paths
from mecha_exp.evaluators.vision.pixels import check_processor, processor_file
from mecha_exp.evaluators.vision.texts import (
    check_lengths,
    check_text_model,
    class_texts,
    fixed_head,
    read_tokenizer,
    templates_of,
    text_head,
    tokenizer_folder,
)

__all__ = ["clip_zero_shot"]

_TEXT = ("text_model.", "text_projection.")


def _text_folder(context: Context, options: Options, folder: ModelFolder) -> Path:
    """The folder with the tokenizer, and with the text tower where that is not merged."""
    if (named := options["text_model"]) is not None:
        return tokenizer_folder([frozen_folder(named, "text_model", context.offline)], "text_model")
    inputs = [path if path.is_dir() else path.parent for path in context.inputs.values()]
    return tokenizer_folder([folder.path, *inputs], "text_model")


def _check(shapes: Shapes, context: Context, options: Options) -> None:
    """Check pictures, processor, class names, text tower and network before anything is merged."""
    folder = folder_of(context, options)
    sets = check_pictures(options)
    words = {task: class_texts(images, options["classes"]) for task, images in sets.items()}
    sentences = {task: templates_of(options["templates"], task) for task in sets}
    file = processor_file(folder, context, options["processor"])
    texts = _text_folder(context, options, folder)
    encoder = encoder_of(folder, options["projection"], context.offline)
    if options["text_model"] is None:
        if not any(key.startswith(_TEXT) for key in shapes):
            raise ConfigError(
                "the model has no text tower (text_model.*), so class names have no features. Name the "
                "folder of the CLIP that it was fine-tuned from with evaluator.text_model=PATH."
            )
        ModelFolder(texts).check_vocabulary(shapes)
    else:
        check_text_model(texts, encoder.width, f"{encoder.kind} of {folder.path}")
    place = {"device": options["device"], "dtype": options["dtype"], "context": context}
    check_network(folder, shapes, encoder.kind, **place)
    of_texts = folder if options["text_model"] is None else ModelFolder(texts)
    for task in sets:
        check_lengths(texts, of_texts, words[task], sentences[task])
    check_processor(sets.values(), folder.config, file)


def _depends(context: Context, options: Options) -> dict[str, Any]:
    folder = folder_of(context, options)
    tasks = list(task_paths(options["data"], options["tasks"]))
    texts = _text_folder(context, options, folder)
    files = [processor_file(folder, context, options["processor"])]
    files += files_in(options["classes"], tasks)
    if "{}" not in str(options["templates"]):
        files += files_in(options["templates"], tasks)
    if encoder := encoder_of(folder, options["projection"], context.offline).projection:
        files.append(encoder)
    if options["text_model"] is not None:
        files += sorted(texts.glob("*.safetensors"))
    decisive = what_decides(options, folder, *files)
    return {**decisive, "texts": ModelFolder(texts).contents}


@image_evaluator("clip_zero_shot", check=_check, depends=_depends)
def clip_zero_shot(
    state_dict: Mapping[str, Tensor],
    *,
    data: str | None = None,
    tasks: Sequence[str] | Mapping[str, str] | None = None,
    classes: Words = None,
    templates: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    text_model: str | None = None,
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
    """Measure a CLIP by class names: a picture has the class whose sentences are most like it.

    The features of a class are the mean over templates of its normalised text features, normalised again
    (Radford et al. 2021, arXiv:2103.00020).

    Args:
        state_dict: the weights of a CLIP, or of its vision tower (then with `text_model`).
        data: the folder with the pictures of a task, or with the folders of the tasks; see `image_data`.
        tasks: the names of the tasks, or names with paths; None is one task.
        classes: words for the classes: by folder, or a list in the order of the folders' names; a file of
            these; or any of them by task. None: the folders' names, with spaces for `_`.
        templates: a sentence with `{}` where the class goes, a list, a file, or any of them by task. None:
            `a photo of a {}.`
        text_model: the folder of a CLIP whose text tower is used for all points. None: each point's own.
        validation_share, split_seed, limit, model, processor, projection, batch_size, device, dtype,
            trust_remote_code, split, context, examples: as for `image_classification`.

    Returns:
        For each picture of each task 1 if it is classified rightly, else 0.

    Raises:
        ConfigError: pictures, class names, processor and network do not fit together.
        EvaluationError: a logit is NaN or infinite.
    """
    context = context or Context()
    options = {**locals()}
    folder = folder_of(context, options)
    sets = image_sets(options, split)
    file = processor_file(folder, context, processor)
    texts = _text_folder(context, options, folder)
    encoder = encoder_of(folder, projection, context.offline)
    with network(folder, state_dict, encoder.kind, device=device, dtype=dtype) as clip:
        heads = {task: _head(clip, images, options, texts) for task, images in sets.items()}
        places = {task: output_places(s, len(s.classes), s.classes, "") for task, s in sets.items()}

        def logits(task: str, pixels: Tensor) -> Tensor:
            features = encoder.features(clip, pixels.to(clip.device, clip.dtype))
            check_width(task, heads[task], features.shape[1], f"{encoder.kind} of {folder.path}")
            return heads[task].logits(features)

        return hits(sets, file, folder.config, batch_size, logits, places, context)


def _head(clip: Any, images: ImageSet, options: Options, texts: Path) -> Head:
    """The zero-shot head of a task, by the point's own text tower or by a fixed one."""
    words = class_texts(images, options["classes"])
    sentences = templates_of(options["templates"], images.task)
    if options["text_model"] is None:
        return text_head(clip, read_tokenizer(texts), words, sentences)
    return fixed_head(texts, changed_at(texts), words, sentences)

"""Pipelines of diffusers: loaded once, with the tensors of each point put into their components."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mecha_exp.architectures import candidates, get_all
from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.transfers import transfers_to
from mecha_exp.evaluators.common import (
    ModelFolder,
    calm,
    chosen_device,
    model_folder,
    named_folder,
    one_line,
)
from mecha_exp.evaluators.common.devices import AUTO
from mecha_exp.evaluators.pictures.components import INDEX, Component, index_of, networks_of
from mecha_exp.sources.source import infos_of

_TEXT_TO_IMAGE = ("prompt", "num_inference_steps", "generator", "height")
_OF_FILMS, _OF_PICTURES, _CONTROL = "num_frames", "image", "controlnet"


def pipeline_folder(context: Context, model: str | None) -> ModelFolder:
    """The folder of the pipeline that is named, or of the first input.

    Args:
        context: the inputs.
        model: a folder, or the name of a pipeline of the hub, which comes with the weights that it needs.

    Raises:
        ConfigError: there is none.
    """
    if model is None:
        try:
            return model_folder(context)
        except ConfigError as error:
            raise ConfigError(f"{error}{_how_to_convert(context)}") from None
    folder = named_folder(model, "model", context.offline, _of_hub)
    return model_folder(context, str(folder))


def _how_to_convert(context: Context) -> str:
    """The command that makes a pipeline's folder of the first input, if that is a single file of one."""
    file = next((path for path in context.inputs.values() if path.is_file()), None)
    if file is None:
        return ""
    with open_stored(file) as stored:
        fits = {f"{fit.config.architecture}-diffusers" for fit in candidates(infos_of(stored))}
    for name in fits & {config.identifier for config in get_all()}:
        command = f"python -m mecha_exp convert {file} --to {name} -o {file.with_suffix('')}"
        return f" A single file becomes such a folder by: {command}"
    return ""


def _of_hub(repository: str, revision: str | None, offline: bool) -> Path:
    from diffusers import DiffusionPipeline

    make: Any = DiffusionPipeline
    folder = Path(make.download(repository, revision=revision, local_files_only=offline))
    networks_of(ModelFolder(folder))  # raises where the cache has the configurations alone
    return folder


def check_pipeline(folder: ModelFolder, settings: Mapping[str, Any]) -> None:
    """Check that a pipeline makes pictures of prompts alone, with the settings that are given.

    Args:
        folder: of the pipeline.
        settings: arguments of its call, by the names of `evaluator`'s settings for them.

    Raises:
        ConfigError: it does not.
    """
    name = index_of(folder).get("_class_name")
    with calm(offline=True):
        import diffusers
        from diffusers.pipelines.auto_pipeline import AUTO_TEXT2IMAGE_PIPELINES_MAPPING

        made = getattr(diffusers, name, None) if isinstance(name, str) else None
        if made is None:
            hint = did_you_mean(str(name), [n for n in dir(diffusers) if n.endswith("Pipeline")])
            raise ConfigError(
                f"{folder.path / INDEX}: diffusers {diffusers.__version__} has no pipeline '{name}'.{hint} "
                "Install the version that wrote it; pipelines with code of their own are not run."
            )
        accepted = inspect.signature(made.__call__).parameters
        also_of_texts = made in AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()
    if any(parameter not in accepted for parameter in _TEXT_TO_IMAGE) or _OF_FILMS in accepted:
        raise ConfigError(f"{folder.path} holds a {name}, which does not make pictures of prompts.")
    if (_OF_PICTURES in accepted and not also_of_texts) or _CONTROL in index_of(folder):
        raise ConfigError(f"{folder.path} holds a {name}, which needs a picture beside each prompt.")
    for setting, parameter in settings.items():
        if parameter not in accepted:
            raise ConfigError(
                f"evaluator.{setting}: the {name} of {folder.path} takes no {parameter}. Set "
                f"evaluator.{setting}=null."
            )


@contextmanager
def pipeline(
    folder: ModelFolder, state_dict: Mapping[str, Tensor], component: str | None, device: str, dtype: str
) -> Iterator[Any]:
    """A pipeline of diffusers with these weights; it loses them when the block ends.

    Args:
        folder: of the pipeline.
        state_dict: keys below the names of the components, or those of one component.
        component: that one; None for all.
        device: where it computes.
        dtype: of its networks, such as `float32`; `auto` is that of the weights.

    Raises:
        ConfigError: the weights do not fit.
    """
    place = chosen_device(device)
    made = _pipeline(Kept(identity_of(folder, component), folder.path))
    merged = [part for part in networks_of(folder) if component in (None, part.name)]
    with ExitStack() as stack:
        for part in (part for part in merged if not part.is_of_diffusers):
            weights = part.part_of(state_dict, component)
            filled = part.filled(getattr(made, part.name), weights, device, dtype)
            stack.callback(setattr, made, part.name, None)  # whose tensors transformers may have changed
            setattr(made, part.name, stack.enter_context(filled))
        own = [part for part in merged if part.is_of_diffusers]  # after the others, which let go of copies
        there = _moved(state_dict, own, component, place, dtype)
        for part in own:
            weights = part.part_of(there, component)
            stack.enter_context(part.filled(getattr(made, part.name), weights, device, dtype))
        with torch.inference_mode():
            yield made.to(place)


def _moved(
    state_dict: Mapping[str, Tensor],
    parts: Sequence[Component],
    component: str | None,
    place: torch.device,
    dtype: str,
) -> Mapping[str, Tensor]:
    """The weights of components where they compute: on a GPU copies, those of the next point beforehand."""
    if place.type == "cpu":
        return state_dict
    wanted = None if dtype == AUTO else getattr(torch, dtype)
    dtypes = {
        key: wanted if wanted and tensor.is_floating_point() else tensor.dtype
        for part in parts
        for key, tensor in state_dict.items()
        if key.startswith(part.prefix(component))
    }
    return transfers_to(place).moved(state_dict, dtypes)


def identity_of(folder: ModelFolder, component: str | None) -> str:
    """What decides a pipeline beside the weights that are merged: those of a component leave the others."""
    return json.dumps([folder.contents, component, component and str(folder.path)])


@dataclass(frozen=True)
class Kept:
    """A pipeline: equal where the merged weights are all that tells two apart.

    Attributes:
        identity: see `identity_of`.
        path: of the folder.
    """

    identity: str
    path: Path = field(compare=False)


@lru_cache(maxsize=1)
def _pipeline(kept: Kept) -> Any:
    """The pipeline in a folder, as diffusers loads it."""
    with calm(offline=True):
        from diffusers import DiffusionPipeline
    with calm(offline=True):  # which quietens what is imported
        make: Any = DiffusionPipeline
        errors = (OSError, ValueError, TypeError, AttributeError)
        with one_line(f"diffusers cannot load the pipeline in {kept.path}", errors):
            made = make.from_pretrained(kept.path, local_files_only=True)
    made.set_progress_bar_config(disable=True)
    return made


def scheduler_class(name: str) -> Any:
    """A scheduler of diffusers by the name of its class.

    Raises:
        ConfigError: there is none of this name.
    """
    with calm(offline=True):
        import diffusers

        known = [entry for entry in dir(diffusers) if entry.endswith("Scheduler")]
        if name not in known:
            raise ConfigError(
                f"evaluator.schedulers: diffusers has no scheduler '{name}'.{did_you_mean(name, known)}"
            )
        return getattr(diffusers, name)

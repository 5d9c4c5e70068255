"""Pipelines of diffusers: loaded once, with the tensors of each point put into their components."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mecha_exp.errors import ConfigError, did_you_mean, some
from mecha_exp.evaluation.registry import Shapes
from mecha_exp.evaluators.common import ModelFolder, calm, chosen_device, one_line

INDEX = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_TEXT_TO_IMAGE = ("prompt", "num_inference_steps", "generator")


def components_of(folder: ModelFolder) -> dict[str, str]:
    """The components of a pipeline and their classes, without those that it leaves empty.

    Raises:
        ConfigError: the folder is not a pipeline, or lacks a component's folder.
    """
    try:
        index = json.loads((folder.path / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(
            f"{folder.path} is not the folder of a diffusers pipeline: there is no {INDEX} in it that can be "
            "read. Name a pipeline with evaluator.model=PATH."
        ) from None
    listed = {
        name: entry for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None
    }
    for name in listed:
        if not (folder.path / name).is_dir():
            raise ConfigError(
                f"{folder.path}: the component '{name}' of the pipeline is missing. Copy its folder there "
                "from the pretrained pipeline."
            )
    return {name: str(entry[1]) for name, entry in listed.items()}


def networks_of(folder: ModelFolder) -> list[str]:
    """The components of a pipeline that have weights."""
    return [name for name in components_of(folder) if weight_files(folder, name)]


def weight_files(folder: ModelFolder, component: str) -> list[Path]:
    """The files with the weights of a component."""
    below = folder.path / component
    return sorted(f for f in below.glob("*") if f.suffix in (".safetensors", ".bin"))


def check_components(folder: ModelFolder, shapes: Shapes, component: str | None) -> None:
    """Check that a state dict has the weights of every component, or of one, and a row for each token.

    Raises:
        ConfigError: it has not.
    """
    networks = networks_of(folder)
    for name in [component] if component else networks:
        _check_tokens(folder, shapes, name, "" if component else f"{name}.")
    if component is not None:
        if component not in networks:
            raise ConfigError(
                f"evaluator.component={component}: the pipeline in {folder.path} has the components "
                f"{some(networks)}."
            )
        return
    lost = [name for name in networks if not any(key.startswith(f"{name}.") for key in shapes)]
    if lost:
        there = some(sorted({key.split(".")[0] for key in shapes}), limit=4)
        raise ConfigError(
            f"the model has no keys of the component '{lost[0]}' of the pipeline in {folder.path}: its keys "
            f"begin with {there}. Merge folders of pipelines; or name the component that is merged, as with "
            "evaluator.component=unet, and the rest is the pipeline's."
        )


def _check_tokens(folder: ModelFolder, shapes: Shapes, component: str, prefix: str) -> None:
    """Check that a text encoder has a row for each token: `text_encoder_2` has `tokenizer_2`."""
    tokens = folder.path / component.replace("text_encoder", "tokenizer")
    if tokens.name != component and tokens.is_dir():
        of_component = {key: shape for key, shape in shapes.items() if key.startswith(prefix)}
        ModelFolder(tokens).check_vocabulary(of_component)


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
        ConfigError: the weights do not fit, or the pipeline does not make pictures of texts.
    """
    place = chosen_device(device)
    made = _pipeline(folder.path, (folder.path / INDEX).stat().st_mtime_ns)
    names = [component] if component else networks_of(folder)
    for name in names:
        prefix = "" if component else f"{name}."
        part = {k.removeprefix(prefix): t for k, t in state_dict.items() if k.startswith(prefix)}
        if dtype != "auto":
            part = {k: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for k, t in part.items()}
        setattr(made, name, _filled(getattr(made, name), part, folder.path / name))
    try:
        with torch.inference_mode():
            yield made.to(place)
    finally:
        for name in names:
            network = getattr(made, name)
            empty = {k: torch.empty_like(t, device="meta") for k, t in network.state_dict().items()}
            network.load_state_dict(empty, assign=True)


def _filled(network: nn.Module, part: Mapping[str, Tensor], folder: Path) -> nn.Module:
    """A component with its weights: put in place, or, under older names, loaded by its library."""
    own = network.state_dict()
    if {k: t.shape for k, t in part.items()} == {k: t.shape for k, t in own.items()}:
        network.load_state_dict(dict(part), assign=True)
        return network.eval()
    kind = type(network).__name__
    with tempfile.TemporaryDirectory() as temporary, calm(offline=True):
        copy = Path(temporary)
        (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
        stem = "model" if (folder / "model.safetensors").is_file() else "diffusion_pytorch_model"
        save_file({key: tensor.contiguous() for key, tensor in part.items()}, copy / f"{stem}.safetensors")
        load: Any = type(network)
        try:
            loaded, report = load.from_pretrained(copy, output_loading_info=True, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"the weights do not fit the {kind} of {folder}: {error}") from None
        if lost := [*report["missing_keys"], *report["mismatched_keys"], *report["unexpected_keys"]]:
            raise ConfigError(f"the weights do not fit the {kind} of {folder}: {some(lost, limit=3)}.")
        dtypes = {tensor.dtype for tensor in part.values() if tensor.is_floating_point()}
        network = loaded.to(dtypes.pop()) if len(dtypes) == 1 else loaded
    return network.eval()


@lru_cache(maxsize=1)
def _pipeline(folder: Path, changed: int) -> Any:
    """The pipeline in a folder, as diffusers loads it."""
    with calm(offline=True):
        from diffusers import DiffusionPipeline

        make: Any = DiffusionPipeline
        errors = (OSError, ValueError, TypeError, AttributeError)
        with one_line(f"diffusers cannot load the pipeline in {folder}", errors):
            made = make.from_pretrained(folder, local_files_only=True)
    accepted = inspect.signature(made.__call__).parameters
    if any(name not in accepted for name in _TEXT_TO_IMAGE):
        raise ConfigError(f"{folder} holds a {type(made).__name__}, which does not make pictures of prompts.")
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

"""What the nodes use of the ComfyUI that runs them; its modules exist in its process only."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mecha_exp.errors import ConfigError

MODEL_FOLDERS = ("checkpoints", "diffusion_models", "text_encoders", "vae", "loras")
"""The kinds of files that are read, by the names that ComfyUI has for their folders."""


def model_names() -> list[str]:
    """The files of models that ComfyUI knows, each as `KIND/NAME`."""
    paths = importlib.import_module("folder_paths")
    known = [kind for kind in MODEL_FOLDERS if kind in paths.folder_names_and_paths]
    return [f"{kind}/{name}" for kind in known for name in paths.get_filename_list(kind)]


def model_path(name: str) -> Path:
    """The path of a model that `model_names` lists.

    Raises:
        ConfigError: it is not there any more.
    """
    kind, _, file = name.partition("/")
    path = importlib.import_module("folder_paths").get_full_path(kind, file)
    if path is None:
        raise ConfigError(f"{name}: ComfyUI has no such file any more. Choose another, or refresh the page.")
    return Path(path)


def checkpoint_folder() -> Path:
    """The first folder in which ComfyUI looks for checkpoints."""
    return Path(importlib.import_module("folder_paths").get_folder_paths("checkpoints")[0])


def output_folder() -> Path:
    """The folder of ComfyUI's outputs."""
    return Path(importlib.import_module("folder_paths").get_output_directory())


def load_parts(state_dict: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
    """MODEL, CLIP and VAE of a merged checkpoint.

    Raises:
        ConfigError: ComfyUI does not know the architecture.
    """
    folders = importlib.import_module("folder_paths").get_folder_paths("embeddings")
    load = importlib.import_module("comfy.sd").load_state_dict_guess_config
    parts = load(state_dict, output_vae=True, output_clip=True, embedding_directory=folders)
    if parts is None:
        raise ConfigError(
            "ComfyUI does not know the architecture of the merged model. Write it to a file instead, and "
            "load that with the loader of its kind."
        )
    model, clip, vae = parts[:3]
    return model, clip, vae


class ProgressBar:
    """ComfyUI's progress bar, with what a merge uses of one of tqdm. A cancelled merge ends at it."""

    def __init__(self, total: int, **_: Any) -> None:
        self._bar = importlib.import_module("comfy.utils").ProgressBar(total)
        management = importlib.import_module("comfy.model_management")
        self._stop_if_cancelled = management.throw_exception_if_processing_interrupted

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, nbytes: int) -> None:
        """Move on by some bytes."""
        self._stop_if_cancelled()
        self._bar.update(nbytes)

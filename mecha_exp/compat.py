"""The older interface of sd-mecha: `RecipeMerger(models_dir=...).merge_and_save(recipe)`."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mecha_exp.api import StateDictOutput, merge
from mecha_exp.engine import EngineOptions
from mecha_exp.graph.nodes import Node

SUFFIX = ".safetensors"

PathLike = str | os.PathLike[str]


class RecipeMerger:
    """Merge recipes whose models lie in certain folders.

    Args:
        models_dir: a folder, or several, where the models are looked for after the current folder; outputs
            with a relative path go to the first. None is the current folder.
        options: of the engine.
        default_device: the device of the arithmetic; None is that of `options`.
        default_dtype: the dtype of the arithmetic; None is that of `options`.
        tqdm: creates progress bars, as in `merge`.

    >>> merger = RecipeMerger(models_dir="models")
    >>> merger.merge_and_save(weighted_sum("a", "b", alpha=0.3), output="merged")
    PosixPath('models/merged.safetensors')
    """

    def __init__(
        self,
        *,
        models_dir: PathLike | Sequence[PathLike] | None = None,
        options: EngineOptions | None = None,
        default_device: str | torch.device | None = None,
        default_dtype: torch.dtype | None = None,
        tqdm: Callable[..., Any] | None = None,
    ) -> None:
        folders = [models_dir] if isinstance(models_dir, str | os.PathLike) else models_dir or []
        self._folders = [Path(folder) for folder in folders]
        options = options or EngineOptions()
        self._options = replace(options, model_dirs=[*self._folders, *options.model_dirs])
        self._keywords = {"merge_device": default_device, "merge_dtype": default_dtype, "tqdm": tqdm}

    def merge_and_save(
        self,
        recipe: Node | PathLike,
        output: PathLike | StateDictOutput = "merge",
        *,
        save_dtype: torch.dtype | None = None,
        save_device: str | torch.device | None = None,
        **keywords: Any,
    ) -> Path | StateDictOutput:
        """Merge a recipe into a file, and return its path.

        Args:
            recipe: a graph, or a model's path.
            output: the path of the file, to which a missing `.safetensors` is added, or a dictionary to fill.
            save_dtype: of the output; None keeps the dtype that each key has in the first input.
            save_device: the device of the tensors of a dictionary.
            keywords: other keywords of `merge`: fallback_model, threads, total_buffer_size and so on.

        Raises:
            MechaError: as in `merge`.
        """
        if not isinstance(output, MutableMapping):
            folder = self._folders[0] if self._folders else Path()
            output = folder / with_suffix(Path(output))
        arguments = {**self._keywords, "output_dtype": save_dtype, "output_device": save_device, **keywords}
        return merge(recipe, output, self._options, **arguments)


def merge_and_save(
    recipe: Node | PathLike, output: PathLike, models_dir: PathLike | None = None
) -> Path | StateDictOutput:
    """Merge a recipe into a file, and return its path; see `RecipeMerger`."""
    return RecipeMerger(models_dir=models_dir).merge_and_save(recipe, output)


def with_suffix(path: Path) -> Path:
    """The path with `.safetensors` appended if missing: `merge-v1.5` becomes `merge-v1.5.safetensors`."""
    return path if path.suffix == SUFFIX else path.with_name(path.name + SUFFIX)

"""Merging to a file as older scripts do it: `RecipeMerger(models_dir=...).merge_and_save(recipe)`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mecha_exp.engine import EngineOptions, Job, merge_many
from mecha_exp.engine.merging import recipe_metadata
from mecha_exp.nodes import Node, as_node

SUFFIX = ".safetensors"

PathLike = str | os.PathLike[str]


class RecipeMerger:
    """Merges recipes whose models lie in given folders.

    Args:
        models_dir: a folder, or several, where the models are looked for after the current folder; outputs
            with a relative path go to the first. None is the current folder.
        options: how merges are run.

    >>> merger = RecipeMerger(models_dir="models")
    >>> merger.merge_and_save(weighted_sum("a", "b", alpha=0.3), output="merged")
    PosixPath('models/merged.safetensors')
    """

    def __init__(
        self, *, models_dir: PathLike | Sequence[PathLike] | None = None, options: EngineOptions | None = None
    ) -> None:
        given = [models_dir] if isinstance(models_dir, str | os.PathLike) else models_dir or []
        self._folders = [Path(folder) for folder in given]
        options = options or EngineOptions()
        self._options = replace(options, model_dirs=[*self._folders, *options.model_dirs])

    def merge_and_save(
        self, recipe: Node | PathLike, output: PathLike = "merge", *, save_dtype: torch.dtype | None = None
    ) -> Path:
        """Merge a recipe into a file, and return its path.

        Args:
            recipe: its graph, or a model's path.
            output: the file; `.safetensors` is added where it does not end so.
            save_dtype: of the output; None keeps the dtype that each key has in the first input.

        Raises:
            MechaError: as `merge`.
        """
        folder = self._folders[0] if self._folders else Path()
        target = folder / with_suffix(Path(output))
        node = as_node(recipe)
        merge_many([Job(node, target, save_dtype, recipe_metadata(node))], self._options)
        return target


def merge_and_save(recipe: Node | PathLike, output: PathLike, models_dir: PathLike | None = None) -> Path:
    """Merge a recipe into a file, and return its path; see `RecipeMerger`."""
    return RecipeMerger(models_dir=models_dir).merge_and_save(recipe, output)


def with_suffix(path: Path) -> Path:
    """The path with `.safetensors` at its end: of `merge-v1.5` it is `merge-v1.5.safetensors`."""
    return path if path.suffix == SUFFIX else path.with_name(path.name + SUFFIX)

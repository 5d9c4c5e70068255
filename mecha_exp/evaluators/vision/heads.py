"""Classification heads that are not merged, from safetensors files; what each of their rows stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.documents import DocumentError, parse_yaml
from mecha_exp.errors import ConfigError, some
from mecha_exp.evaluators.common import one_line
from mecha_exp.evaluators.vision.image_data import ImageSet

Names = str | Sequence[str | int]
Words = Names | Mapping[str, Names | Mapping[str, str]] | None
"""Names for the classes of all tasks, or by task; see `listed`."""

WEIGHT, BIAS = "weight", "bias"


@dataclass(frozen=True, eq=False)
class Head:
    """A linear head: logits = features weight^T + bias.

    Attributes:
        weight: [classes, width].
        bias: [classes], or None: then the features are divided by their norm, as CLIP's are.
    """

    weight: Tensor
    bias: Tensor | None = None

    def logits(self, features: Tensor) -> Tensor:
        """The logits [pictures, classes] of features [pictures, width], in float32."""
        features = features.float()
        if self.bias is None:
            features = F.normalize(features, dim=-1)
        weight = self.weight.to(features.device)
        return F.linear(features, weight, None if self.bias is None else self.bias.to(features.device))


def head_files(heads: str | Mapping[str, str], tasks: Sequence[str]) -> dict[str, Path]:
    """The file with the head of each task.

    Args:
        heads: files by task; or a folder with `TASK.safetensors`; or one file with `TASK.weight`.
        tasks: the names of the tasks.

    Raises:
        ConfigError: a task has none, or a head belongs to no task.
    """
    if isinstance(heads, Mapping):
        if unknown := [task for task in heads if task not in tasks]:
            raise ConfigError(
                f"evaluator.heads.{unknown[0]}: there is no such task; there are {some(tasks)}."
            )
        files = {str(task): Path(str(path)).expanduser() for task, path in heads.items()}
    else:
        root = Path(str(heads)).expanduser()
        files = {task: root / f"{task}.safetensors" if root.is_dir() else root for task in tasks}
    for task in tasks:
        if task not in files:
            raise ConfigError(f"evaluator.heads: the task '{task}' has no head: name its safetensors file.")
        if not files[task].is_file():
            raise ConfigError(f"evaluator.heads: {files[task]}, the head of '{task}', does not exist.")
    return files


def read_head(task: str, file: Path) -> Head:
    """Read a head: `weight` [classes, width] and perhaps `bias` [classes], alone or below `TASK.`.

    Raises:
        ConfigError: the file is not such a head.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with one_line(f"{file} cannot be read as safetensors", (SafetensorError, OSError)):
        tensors = load_file(file)
    prefixes = (f"{task}.", "", "classifier.", "head.")
    prefix = next((prefix for prefix in prefixes if f"{prefix}{WEIGHT}" in tensors), None)
    if prefix is None:
        raise ConfigError(
            f"{file} has no '{WEIGHT}' (or '{task}.{WEIGHT}') of a head for '{task}', only {some(tensors)}."
        )
    weight, bias = tensors[f"{prefix}{WEIGHT}"], tensors.get(f"{prefix}{BIAS}")
    if weight.ndim != 2 or (bias is not None and tuple(bias.shape) != (weight.shape[0],)):
        shapes = [list(tensor.shape) for tensor in (weight, bias) if tensor is not None]
        raise ConfigError(
            f"{file}: the head of '{task}' has shapes {shapes}: expected [classes, width], [classes]."
        )
    return Head(weight.float(), None if bias is None else bias.float())


def check_width(task: str, head: Head, width: int, source: str) -> None:
    """Check that a head takes features of this width.

    Raises:
        ConfigError: it takes others.
    """
    if head.weight.shape[1] != width:
        raise ConfigError(
            f"the head of '{task}' takes {head.weight.shape[1]} features, and {source} gives {width}. Name "
            "heads that were made for this encoder with evaluator.heads. Text heads of CLIP need its "
            "projection, which a vision tower alone has not: evaluator.projection=PATH names it."
        )


def output_places(
    images: ImageSet, outputs: int, names: Sequence[str] | None, source: str
) -> NDArray[np.int64]:
    """The output of a network that stands for each class of a task.

    Classes are found by name where the names of the outputs are known. Numbers are places themselves. Other
    classes must be as many as the outputs, and are taken in the order of their names.

    Args:
        images: of the task.
        outputs: their number.
        names: of the outputs; None if they are not known.
        source: of the outputs, for errors.

    Raises:
        ConfigError: a class has no output, or the order is not known.
    """
    classes = images.classes
    if names is not None and len(names) != outputs:
        raise ConfigError(f"{source} has {outputs} outputs, and {len(names)} names are given for them.")
    if names is not None and set(classes) <= set(names):
        return np.array([names.index(name) for name in classes], dtype=np.int64)
    order = f"List the classes in the order of the outputs with evaluator.classes={{{images.task}: [...]}}"
    if all(name.isdecimal() for name in classes):
        places = np.array([int(name) for name in classes], dtype=np.int64)
        if max(places) >= outputs:
            raise ConfigError(
                f"{images.path}: the label {max(places)} is out of range: {source} has {outputs} outputs, 0 "
                f"to {outputs - 1}. {order} if the numbers begin elsewhere."
            )
        return places
    if names is not None:
        lost = next(name for name in classes if name not in names)
        raise ConfigError(
            f"{images.path}: the class '{lost}' is none of the outputs of {source}: {some(names, limit=5)}. "
            f"Name the folders like the outputs. {order}."
        )
    if len(classes) != outputs:
        raise ConfigError(
            f"{images.path} has {len(classes)} classes, and {source} has {outputs} outputs. {order}, or name "
            "other data."
        )
    return np.arange(outputs)


def listed(value: Any, task: str, key: str) -> list[str] | dict[str, str] | None:
    """Names for a task: a list, a mapping, or a file with one on each line (or of JSON or YAML).

    Args:
        value: of the setting: for all tasks, or by task; a folder has `TASK.txt`.
        task: the name of the task.
        key: of the setting, for errors.

    Returns:
        the names; None where none are given.

    Raises:
        ConfigError: a file cannot be read.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        if task not in value:
            return None
        value = value[task]
    if isinstance(value, Mapping):
        return {str(name): str(text) for name, text in value.items()}
    if isinstance(value, list | tuple):
        return [str(name) for name in value]
    file = name_file(value, task)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"evaluator.{key}: {file} cannot be read: {error}") from None
    if file.suffix in (".json", ".yaml", ".yml"):
        return _structured(file, text, key)
    return [line.strip() for line in text.splitlines() if line.strip()]


def name_file(value: Any, task: str) -> Path:
    """The file of a setting that `listed` reads: itself, or `TASK.txt` (.json, .yaml) in a folder."""
    path = Path(str(value)).expanduser()
    if not path.is_dir():
        return path
    candidates = [path / f"{task}{suffix}" for suffix in (".txt", ".json", ".yaml")]
    return next((file for file in candidates if file.is_file()), candidates[0])


def files_in(value: Any, tasks: Sequence[str]) -> list[Path]:
    """The files that a setting of `listed` names, for what decides a number."""
    parts = [value.get(task) for task in tasks] if isinstance(value, Mapping) else [value] * len(tasks)
    pairs = zip(tasks, parts, strict=True)
    return sorted({name_file(part, task) for task, part in pairs if isinstance(part, str)})


def _structured(file: Path, text: str, key: str) -> list[str] | dict[str, str]:
    try:
        content = parse_yaml(text)  # JSON is YAML
    except DocumentError as error:
        raise ConfigError(f"evaluator.{key}: {file} cannot be read: {error}") from None
    if isinstance(content, Mapping):
        return {str(name): str(value) for name, value in content.items()}
    if isinstance(content, list):
        return [str(name) for name in content]
    raise ConfigError(f"evaluator.{key}: {file} holds neither a list nor a mapping.")

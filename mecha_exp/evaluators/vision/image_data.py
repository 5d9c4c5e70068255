"""Labelled pictures of a task: folders of images by class, or Parquet files with the images' bytes.

    TASK/validation/CLASS/*.jpg, TASK/test/CLASS/*.jpg      both splits as folders
    TASK/test/CLASS/*.jpg, or TASK/CLASS/*.jpg              divided by a share and a seed
    TASK/validation-*.parquet, TASK/test-*.parquet          the same as tables, as the hub has them
    TASK.parquet                                            one table, divided

`val`, `valid` and `dev` mean `validation`; folders and tables of the training split are left out.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mecha_exp.errors import ConfigError, some
from mecha_exp.evaluators.common import one_line
from mecha_exp.evaluators.vision.tables import LABEL, PICTURE, Table, read_tables
from mecha_exp.numbers import is_number, is_whole

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"))
VALIDATION, TEST, TRAIN = "validation", "test", "train"
_NAMES = {VALIDATION: ("validation", "val", "valid", "dev"), TEST: ("test",), TRAIN: ("train", "training")}
_SPLIT_OF = {name: split for split, names in _NAMES.items() for name in names}
DEFAULT_SHARE = 0.5


@dataclass(frozen=True)
class ImageSet:
    """The labelled pictures of a task on a split; equal sets have equal files.

    Attributes:
        fingerprint: of the files by path, size and time of change, and of what chose among them.
        task: its name.
        path: of its folder or table.
        examples: a stable name for each picture: its path below the task, or the table and the row.
        labels: the place of each picture's class in `classes`.
        classes: the names of all classes, in order; those of unnamed integer labels are the integers.
        opened: opens the picture at a place.
    """

    fingerprint: str
    task: str = field(compare=False)
    path: Path = field(compare=False)
    examples: tuple[str, ...] = field(compare=False)
    labels: NDArray[np.int64] = field(compare=False)
    classes: tuple[str, ...] = field(compare=False)
    opened: Callable[[int], Image] = field(compare=False)

    def __len__(self) -> int:
        return len(self.examples)

    def among(self, places: Sequence[int]) -> ImageSet:
        """The pictures at some places."""
        digest = hashlib.sha256(json.dumps(list(places)).encode()).hexdigest()
        return replace(
            self,
            fingerprint=f"{self.fingerprint} {digest}",
            examples=tuple(self.examples[place] for place in places),
            labels=self.labels[list(places)],
            opened=lambda index: self.opened(places[index]),
        )


@dataclass(frozen=True)
class Division:
    """How a task without both splits is divided.

    Attributes:
        share: of each class that is validation, above 0 and below 1; None is a half, where it is needed.
        seed: of the division.
        limit: at most so many pictures of a split, drawn by the seed; None is all.
    """

    share: float | None = None
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: one is not in its range.
        """
        if self.share is not None and not (is_number(self.share) and 0 < self.share < 1):
            raise ConfigError(
                f"evaluator.validation_share={self.share}: expected a number above 0 and below 1."
            )
        if self.limit is not None and not is_whole(self.limit, least=1):
            raise ConfigError(f"evaluator.limit={self.limit}: expected a whole number of at least 1.")


def task_paths(data: str | None, tasks: Sequence[str] | Mapping[str, str] | None) -> dict[str, Path]:
    """The folder or table of each task by its name.

    Args:
        data: a folder; of one task, or of all tasks.
        tasks: names of folders (or of tables without `.parquet`) in `data`, or names with their paths, which
            are relative to `data` if it is given. None: `data` is one task.

    Raises:
        ConfigError: a path does not exist.
    """
    root = Path(data).expanduser() if data else Path()
    if not data and not isinstance(tasks, Mapping):
        raise ConfigError("evaluator.data: name the folder with the pictures, as with data.dir=PATH.")
    if tasks is None:
        return {root.resolve().stem if root.is_file() else root.resolve().name: _existing(root, "data")}
    named = tasks if isinstance(tasks, Mapping) else {task: task for task in tasks}
    if not named:
        raise ConfigError("evaluator.tasks: there is no task in it.")
    paths = {}
    for task, path in named.items():
        place = root / Path(str(path)).expanduser()
        table = place.with_name(f"{place.name}.parquet")
        paths[str(task)] = table if not place.exists() and table.is_file() else _existing(place, "tasks")
    return paths


def _existing(path: Path, key: str) -> Path:
    if path.exists():
        return path
    near = sorted(other.name for other in path.parent.glob("*")) if path.parent.is_dir() else []
    beside = f" In {path.parent} there are {some(near, limit=5)}." if near else ""
    raise ConfigError(f"evaluator.{key}: {path} does not exist.{beside}")


def image_files(path: Path) -> list[Path]:
    """The files of a task that can decide its numbers: all but those of the training split."""
    parts = _parts(path)
    parts.pop(TRAIN, None)
    return [file for files in parts.values() for file in files]


def image_set(task: str, path: Path, split: str, division: Division) -> ImageSet:
    """List the pictures of a task on a split.

    Raises:
        ConfigError: there are none, the layout is none of those above, or `validation_share` is given though
            both splits are there.
    """
    parts = _parts(path)
    available = [part for part in (VALIDATION, TEST) if part in parts]
    if division.share is not None and len(available) == 2:
        raise ConfigError(
            f"evaluator.validation_share: {path} has both splits, {VALIDATION} and {TEST}: leave it out."
        )
    chosen = split if len(available) == 2 else (available or [""])[0]
    if chosen not in parts:
        raise ConfigError(
            f"{path}: there are pictures for training alone. Give it a folder '{TEST}', with a folder for "
            "each class, or one without splits."
        )
    listing = _tables(path, parts, chosen) if _is_table(parts[chosen]) else _folders(path, parts, chosen)
    examples, labels, classes, opened = listing
    rows = list(range(len(examples)))
    if len(available) < 2:
        rows = _divided(examples, labels, split, division)
    if division.limit is not None:
        rows = sorted(sorted(rows, key=lambda row: _draw(division.seed, examples[row]))[: division.limit])
    if not rows:
        raise ConfigError(f"{path}: there is no picture for the split '{split}'.")
    facts = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in parts[chosen]]
    fingerprint = hashlib.sha256(repr((split, division, rows, facts)).encode()).hexdigest()
    names = tuple(examples[row] for row in rows)
    return ImageSet(
        fingerprint, task, path, names, labels[rows], tuple(classes), lambda place: opened(rows[place])
    )


Listing = tuple[Sequence[str], NDArray[np.int64], Sequence[str], Callable[[int], "Image"]]


def _parts(path: Path) -> dict[str, list[Path]]:
    """The files of each split that a task has; those of a task without splits under an empty name.

    Raises:
        ConfigError: there are none.
    """
    if path.is_file():
        return {"": [path]}
    tables = sorted(path.rglob("*.parquet"))
    if tables:
        parts: dict[str, list[Path]] = {}
        for table in tables:
            parts.setdefault(_split_of_table(table, path), []).append(table)
        return parts
    folders = {_SPLIT_OF.get(child.name.lower(), ""): child for child in path.iterdir() if child.is_dir()}
    named = {split: [*_images_below(folder)] for split, folder in folders.items() if split}
    parts = named or {"": [*_images_below(path)]}
    if not any(parts.values()):
        raise ConfigError(
            f"{path}: there are no pictures in it ({', '.join(sorted(SUFFIXES))}) and no .parquet files. "
            f"Expected {path.name}/CLASS/*.png, or {path.name}/{TEST}/CLASS/*.png."
        )
    return parts


def _split_of_table(table: Path, root: Path) -> str:
    """The split that a table's name or folder begins with; empty if it names none."""
    for part in table.relative_to(root).parts:
        word = re.split(r"[-_.\d]", part.lower(), maxsplit=1)[0]
        if word in _SPLIT_OF:
            return _SPLIT_OF[word]
    return ""


def _images_below(folder: Path) -> Iterator[Path]:
    return (f for f in sorted(folder.rglob("*")) if f.suffix.lower() in SUFFIXES and f.is_file())


def _is_table(files: Sequence[Path]) -> bool:
    return bool(files) and files[0].suffix == ".parquet"


def _folders(path: Path, parts: Mapping[str, Sequence[Path]], chosen: str) -> Listing:
    """The pictures of one split of folders by class."""
    class_of: dict[Path, str] = {}
    for split, files in parts.items():
        for file in files:
            below = file.relative_to(path).parts[1:] if split else file.relative_to(path).parts
            if len(below) < 2:
                raise ConfigError(
                    f"{file}: its class is unknown. Put it into a folder named after its class, as in "
                    f"{file.parent / 'CLASS' / file.name}."
                )
            class_of[file] = below[0]
    classes = _ordered(set(class_of.values()))
    places = {name: place for place, name in enumerate(classes)}
    files = list(parts[chosen])
    labels = np.array([places[class_of[file]] for file in files], dtype=np.int64)
    examples = [file.relative_to(path).as_posix() for file in files]
    return examples, labels, classes, lambda place: _open(files[place])


def _tables(path: Path, parts: Mapping[str, Sequence[Path]], chosen: str) -> Listing:
    """The pictures of one split of tables."""
    table: Table = read_tables(path, parts[chosen])
    classes = table.names
    if classes is None and all(isinstance(label, int) for label in table.labels):
        classes = [str(label) for label in range(max(table.labels, default=0) + 1)]
    if classes is not None:
        _check_range(path, table.labels, len(classes))
        labels = np.array(table.labels, dtype=np.int64)
    else:
        others = (read_tables(path, files).labels for split, files in parts.items() if split != chosen)
        classes = _ordered(
            {str(label) for label in table.labels} | {str(x) for other in others for x in other}
        )
        labels = np.array([classes.index(str(label)) for label in table.labels], dtype=np.int64)
    return table.examples, labels, classes, partial(_open_in_table, table)


def _check_range(path: Path, labels: Sequence[int], count: int) -> None:
    """Check that labels are places among the classes."""
    outside = [label for label in labels if not 0 <= label < count]
    if outside:
        raise ConfigError(
            f"{path}: the label {outside[0]} is out of range: there are {count} classes, 0 to {count - 1}. "
            f"-1 means that a picture has no label: another column than '{LABEL}' may have it."
        )


def _ordered(classes: set[str]) -> list[str]:
    """The classes in the order of their names; numbers by value."""
    return sorted(classes, key=lambda c: (0, int(c), c) if c.isdecimal() else (1, 0, c))


def _divided(examples: Sequence[str], labels: NDArray[np.int64], split: str, division: Division) -> list[int]:
    """The rows of a split, drawn within each class by the names of the pictures and the seed."""
    share = DEFAULT_SHARE if division.share is None else division.share
    chosen: list[int] = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label).tolist()
        rows.sort(key=lambda row: _draw(division.seed, examples[row]))
        count = round(share * len(rows))
        chosen += rows[:count] if split == VALIDATION else rows[count:]
    return sorted(chosen)


def _draw(seed: int, example: str) -> bytes:
    """A random key of an example, the same on every machine."""
    return hashlib.sha256(f"{seed}/{example}".encode()).digest()


def _open(file: Path) -> Image:
    from PIL import Image

    with one_line(f"{file} is not a picture that can be read", (OSError,)), Image.open(file) as picture:
        converted: Image.Image = picture.convert("RGB")
        return converted


def _open_in_table(table: Table, place: int) -> Image:
    from PIL import Image

    what = f"{table.examples[place]}: the column '{PICTURE}' does not hold a picture there"
    with one_line(what, (OSError, TypeError)), Image.open(io.BytesIO(table.content(place))) as picture:
        converted: Image.Image = picture.convert("RGB")
        return converted

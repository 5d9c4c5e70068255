"""The progress of learning in files: its state for the next start, and tables of losses and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mecha_exp.app.adaptive.optimiser import Adam, Floats
from mecha_exp.documents import read_json, typed
from mecha_exp.errors import ConfigError
from mecha_exp.report.adaptive_records import LOSSES_FILE, WEIGHTS_FILE
from mecha_exp.system.atomic_write import atomic_write_text
from mecha_exp.system.texts import csv_text, file_name


@dataclass(frozen=True)
class Progress:
    """The progress of a descent.

    Attributes:
        adam: the state of the optimiser.
        losses: the loss before each step.
        kept: the weights after some steps, float64 [parts, experts].
    """

    adam: Adam
    losses: Sequence[float]
    kept: Mapping[int, Floats]


@dataclass(frozen=True)
class _Content:
    """The content of a file; `kept` are weights by step, [parts, experts]."""

    key: str
    adam: dict[str, Any]
    kept: dict[str, list[list[float]]]
    losses: tuple[float, ...]


def file_of(folder: Path, name: str) -> Path:
    """The file in a sweep's folder that keeps the progress of a descent of that name."""
    return folder / f"learning-{file_name(name.replace('/', '-'))}.json"


def read_progress(path: Path, key: str, begun: Progress) -> Progress:
    """The progress in a file; that of a descent which begins where there is none.

    Raises:
        ConfigError: it is damaged.
    """
    if not path.exists():
        return begun
    try:
        content = typed(read_json(path), _Content)
        if content.key != key:  # other inputs, data or code: what was learned then is not asked for
            return begun
        kept = {int(step): np.array(values, dtype=np.float64) for step, values in content.kept.items()}
        return Progress(begun.adam.at(content.adam), content.losses, kept)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}. Delete it to learn anew.") from None


def write_progress(path: Path, key: str, progress: Progress) -> None:
    """Write the progress, atomically; numbers keep all their digits."""
    kept = {str(step): values.tolist() for step, values in progress.kept.items()}
    content = {"key": key, "adam": progress.adam.as_lists(), "kept": kept, "losses": list(progress.losses)}
    atomic_write_text(path, json.dumps(content))


def write_tables(
    folder: Path,
    learned: Mapping[str, Progress],
    parts: Mapping[str, Sequence[str]],
    experts: Sequence[str],
) -> None:
    """Write the losses by step and the kept weights of all descents as CSV.

    Args:
        folder: of the sweep.
        learned: the progress of each descent, by name.
        parts: the parts that have weights, by the same names.
        experts: their names.
    """
    losses = [[name, step, repr(v)] for name, p in learned.items() for step, v in enumerate(p.losses)]
    atomic_write_text(folder / LOSSES_FILE, csv_text([["learned", "step", "loss"], *losses]))
    weights = [
        [name, step, part, expert, repr(float(value))]
        for name, progress in learned.items()
        for step, values in progress.kept.items()
        for part, row in zip(parts[name], values, strict=True)
        for expert, value in zip(experts, row, strict=True)
    ]
    heads = ["learned", "step", "part", "expert", "weight"]
    atomic_write_text(folder / WEIGHTS_FILE, csv_text([heads, *weights]))

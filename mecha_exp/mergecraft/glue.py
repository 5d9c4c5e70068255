"""mergecraft's measure of a pipeline on a task of GLUE, over data that lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from mecha_exp.errors import ConfigError, did_you_mean, some
from mecha_exp.evaluators.common import calm, one_line
from mecha_exp.evaluators.common.tables import Row, read_rows
from mecha_exp.evaluators.glue import COLUMNS, Rows, Task, examples_of, measured, metrics_of, targets

HUB_NAME = "nyu-mll/glue"
NEEDED = "evaluate_glue_pipeline needs datasets and scikit-learn: pip install 'mecha_exp[text]'"
NAMES = {"mcc": "matthews_correlation", "spearman": "spearmanr"}
"""The metrics that mergecraft's results, those of `evaluate`, call otherwise."""


def evaluate_glue_pipeline(
    pipeline: Any, task: str, split: str = "validation", *, data: str | os.PathLike[str] | None = None
) -> dict[str, float]:
    """Measure a transformers pipeline for `text-classification` on a task of GLUE.

    Args:
        pipeline: its model has the head of the task. Outputs are counted in their order, whatever they are
            called.
        task: `cola`, `sst2`, `mrpc`, `qqp`, `stsb`, `mnli`, `qnli`, `rte` or `wnli`.
        split: such as `validation`, `validation_matched` or `train`; `test` of GLUE has no labels.
        data: a file or a folder of rows, or a folder that `datasets` saved with this split. None is the hub's
            cache on this machine; nothing is downloaded.

    Returns:
        GLUE's metrics of the task: `accuracy`, `f1`, `matthews_correlation`, `pearson`, `spearmanr`.

    Raises:
        ConfigError: the task is unknown, its data are not there, or a label is not an output of the head.
    """
    if task not in COLUMNS:
        raise ConfigError(f"'{task}' is not a task of GLUE.{did_you_mean(task, COLUMNS)}")
    with one_line(NEEDED, (ImportError,)):
        import sklearn  # noqa: F401
    place = _split_of(Path(data), split) if data is not None else Path(HUB_NAME, task, split)
    text, pair = COLUMNS[task]
    described = Task(task, place, None, text, pair, "label", None, None)
    columns = (text, *([pair] if pair else []), "label")
    rows = examples_of(described, _cached_rows(task, split) if data is None else read_rows(place, columns))
    names = _outputs_of(pipeline)
    outputs = len(names)
    metrics = metrics_of(described, outputs)
    truth = targets(described, rows.labels, outputs, names)
    logits = _logits(pipeline, rows, names)
    answers = logits[:, 0] if outputs == 1 else logits.argmax(axis=1)
    return {NAMES.get(name, name): measured(name, truth, answers, outputs) for name in metrics}


def _outputs_of(pipeline: Any) -> list[str]:
    """The names of a head's outputs, in their order."""
    config = pipeline.model.config
    names = [str(config.id2label[number]) for number in range(config.num_labels)]
    if len(set(names)) < len(names):
        raise ConfigError(f"id2label of the model names two outputs alike: {', '.join(names)}.")
    return names


def _split_of(path: Path, split: str) -> Path:
    """The rows of a split: a folder of its name, or the path itself."""
    if not path.exists():
        raise ConfigError(f"data: {path} does not exist.")
    if not (path / "dataset_dict.json").is_file():
        _require_one_split(path)
        return path
    if not (path / split).is_dir():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        raise ConfigError(f"{path} has no split '{split}'.{did_you_mean(split, splits)}")
    return path / split


def _require_one_split(path: Path) -> None:
    """Refuse a folder with files of several splits, as the hub has them: `train-00000-of-00001.parquet`."""
    files = path.glob("*-*-of-*.parquet")
    if len(splits := sorted({file.name.partition("-")[0] for file in files})) > 1:
        raise ConfigError(f"data: {path} holds the splits {some(splits)}: name a file of one of them.")


def _cached_rows(task: str, split: str) -> list[Row]:
    with one_line(NEEDED, (ImportError,)):
        import datasets
    fetch = f"python -c \"import datasets; datasets.load_dataset('{HUB_NAME}', '{task}')\""
    trouble = (
        f"{HUB_NAME}, {task}, split {split}, is not in the hub's cache; `{fetch}` fetches it, or name data"
    )
    with one_line(trouble, (OSError, ValueError)), calm(offline=True):
        return list(datasets.load_dataset(HUB_NAME, task, split=split))


def _logits(pipeline: Any, rows: Rows, names: list[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The logits [rows, outputs], in the order of the outputs."""
    if rows.pairs is None:
        texts = [{"text": text} for text in rows.texts]
    else:
        paired = zip(rows.texts, rows.pairs, strict=True)
        texts = [{"text": text, "text_pair": pair} for text, pair in paired]
    answers = pipeline(texts, top_k=None, function_to_apply="none", truncation=True)
    by_name = [{answer["label"]: answer["score"] for answer in each} for each in answers]
    return np.array([[scores[name] for name in names] for scores in by_name], dtype=np.float64)

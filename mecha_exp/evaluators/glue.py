"""Text tasks as GLUE has them: columns, labels, heads and metrics.

Source: Wang et al. 2018, arXiv:1804.07461.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mecha_exp.errors import ConfigError, brief, did_you_mean, some
from mecha_exp.evaluators.common import one_line
from mecha_exp.evaluators.common.tables import KINDS, Row, read_rows

COLUMNS = {
    **dict.fromkeys(("cola", "sst2"), ("sentence", None)),
    **dict.fromkeys(("mrpc", "stsb", "rte", "wnli"), ("sentence1", "sentence2")),
    **dict.fromkeys(("mnli", "ax"), ("premise", "hypothesis")),
    "qqp": ("question1", "question2"),
    "qnli": ("question", "sentence"),
}
"""The columns of a text and its pair by GLUE's names of tasks."""
GLUE_METRICS = {
    "cola": ("mcc",),
    "ax": ("mcc",),
    "mrpc": ("f1", "accuracy"),
    "qqp": ("f1", "accuracy"),
    "stsb": ("pearson", "spearman"),
}
"""The metrics of GLUE's tasks; all others have accuracy."""
OF_CLASSES, OF_NUMBERS = ("accuracy", "f1", "mcc"), ("pearson", "spearman")
PER_TASK = ("data", "head", "text", "text_pair", "label", "labels", "metrics")
"""The settings that a task may have of its own."""
DEFAULT = "text"


@dataclass(frozen=True)
class Task:
    """A task, as the settings describe it.

    Attributes:
        name: of the task.
        data: the file or folder with its rows on a split.
        head: a safetensors file with the tensors of its head; None is the model's own.
        text: the column of the text.
        pair: the column of the second text, if there are two.
        label: the column of the label.
        labels: names of the outputs in their order, for labels that are words.
        metrics: that are asked for; None are GLUE's.
    """

    name: str
    data: Path
    head: Path | None
    text: str
    pair: str | None
    label: str
    labels: tuple[str, ...] | None
    metrics: tuple[str, ...] | None


def read_tasks(options: Mapping[str, Any], split: str) -> list[Task]:
    """The tasks that the parameters of the evaluator name, on a split.

    Raises:
        ConfigError: a setting is unknown, a file does not exist, or two tasks have the same rows.
    """
    asked = options["tasks"]
    if asked is None:
        asked = [DEFAULT]
    elif isinstance(asked, str):
        asked = [asked]
    if not isinstance(asked, Mapping):
        asked = {str(name): {} for name in asked}
    if not asked:
        raise ConfigError("evaluator.tasks: name at least one task.")
    tasks = [_task(name, own or {}, options, split) for name, own in asked.items()]
    _require_rows_of_their_own(tasks)
    return tasks


def _require_rows_of_their_own(tasks: Sequence[Task]) -> None:
    """Raise ConfigError where two tasks have the same texts and labels: one file was given for both."""
    owners: dict[tuple[object, ...], str] = {}
    for task in tasks:
        first = owners.setdefault((task.data, task.text, task.pair, task.label), task.name)
        if first != task.name:
            raise ConfigError(
                f"evaluator.tasks: {first} and {task.name} have the same rows, {task.data}. Name a folder "
                "with a file for each task, or for each task columns of its own."
            )


def _task(name: str, own: Mapping[str, Any], options: Mapping[str, Any], split: str) -> Task:
    for key in own:
        if key not in PER_TASK:
            raise ConfigError(
                f"evaluator.tasks.{name}.{key}: a task has no such setting.{did_you_mean(key, PER_TASK)}"
            )
    values = {key: own.get(key, options.get(key)) for key in PER_TASK}
    if "head" not in own and options["heads"] is not None:
        values["head"] = Path(options["heads"]) / f"{name}.safetensors"
    head = None if values["head"] is None else Path(str(values["head"])).expanduser()
    if head is not None and not head.is_file():
        raise ConfigError(f"evaluator.tasks.{name}: its head {head} does not exist.")
    text, pair = COLUMNS.get(name, (DEFAULT, None)) if values["text"] is None else (values["text"], None)
    metrics = [values["metrics"]] if isinstance(values["metrics"], str) else values["metrics"]
    for metric in metrics or ():
        if metric not in (*OF_CLASSES, *OF_NUMBERS):
            known = (*OF_CLASSES, *OF_NUMBERS)
            raise ConfigError(f"evaluator.metrics: unknown metric '{metric}'.{did_you_mean(metric, known)}")
    return Task(
        name=name,
        data=_rows_of(name, own, options, split),
        head=head,
        text=text,
        pair=values["text_pair"] or pair,
        label=values["label"],
        labels=tuple(map(str, values["labels"])) if values["labels"] else None,
        metrics=tuple(metrics) if metrics else None,
    )


def _rows_of(name: str, own: Mapping[str, Any], options: Mapping[str, Any], split: str) -> Path:
    """The file with the rows of a task."""
    if split == "validation" and "data" in own:
        path = Path(str(own["data"])).expanduser()
        if not path.exists():
            raise ConfigError(f"evaluator.tasks.{name}.data: {path} does not exist.")
        return path
    key = "data" if split == "validation" or options["test"] is None else "test"
    if options[key] is None:
        where = "evaluator.data" if options["tasks"] is None else f"evaluator.tasks.{name}.data"
        raise ConfigError(f"{where}: name a file with the rows of '{name}'.")
    root = Path(options[key])
    if options["tasks"] is None or root.is_file():
        return root
    for path in (root / name, *(root / f"{name}{suffix}" for suffix in KINDS)):
        if path.exists():
            return path
    raise ConfigError(
        f"evaluator.{key}: {root} has no folder '{name}', and no file {name}{', '.join(KINDS)}, for the task."
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """The examples of a task.

    Attributes:
        texts: of the examples.
        pairs: second texts, or None.
        labels: as they stand in the data: numbers, or words.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: list[Any]

    def among(self, places: Sequence[int]) -> Rows:
        """The examples at some places."""
        pairs = None if self.pairs is None else [self.pairs[place] for place in places]
        return Rows([self.texts[place] for place in places], pairs, [self.labels[place] for place in places])


def read_examples(task: Task, limit: int | None) -> Rows:
    """The examples of a task, the first ones where there is a limit.

    Raises:
        ConfigError: a column is not there, or a text is none.
    """
    columns = (task.text, *([task.pair] if task.pair else []), task.label)
    return examples_of(task, read_rows(task.data, columns)[:limit])


def examples_of(task: Task, rows: Sequence[Row]) -> Rows:
    """The examples of a task in rows that have its columns.

    Raises:
        ConfigError: a text is none.
    """
    for number, row in enumerate(rows):
        for column in (task.text, task.pair):
            if column and not isinstance(row[column], str):
                kind = type(row[column]).__name__
                raise ConfigError(
                    f"{task.data}: the column '{column}' holds no text in row {number}, but {kind}."
                )
    pairs = [row[task.pair] for row in rows] if task.pair else None
    return Rows([row[task.text] for row in rows], pairs, [row[task.label] for row in rows])


def targets(task: Task, labels: Sequence[Any], outputs: int, names: Sequence[str]) -> NDArray[Any]:
    """The labels as places of outputs (int64), or as float64 where there is one output.

    Args:
        task: of the labels.
        labels: numbers, numbers as text, or names of outputs.
        outputs: of the network.
        names: of the outputs, as the configuration has them; empty where it has none.

    Raises:
        ConfigError: a label is neither a number nor a name, or is out of range.
    """
    names = list(task.labels or names)
    if task.labels and len(names) != outputs:
        raise ConfigError(
            f"evaluator.labels: {len(names)} names for the {outputs} outputs of the head of '{task.name}'."
        )
    values = [_target(task, number, label, outputs, names) for number, label in enumerate(labels)]
    return np.array(values, dtype=np.float64 if outputs == 1 else np.int64)


def _target(task: Task, number: int, label: Any, outputs: int, names: list[str]) -> float:
    known = some(names, limit=5) or "none is known"
    where = f"{task.data}, row {number}: the label {brief(label)}"
    if isinstance(label, str) and label in names and outputs > 1:
        return names.index(label)
    try:
        value = float(label)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where} is neither a number nor the name of an output ({known}). Name "
            "the outputs in their order with evaluator.labels."
        ) from None
    if not math.isfinite(value):
        raise ConfigError(f"{where} is not a finite number.")
    if outputs > 1 and (value != int(value) or not 0 <= value < outputs):
        raise ConfigError(
            f"{where} is out of range: the head of '{task.name}' has {outputs} outputs, 0 to {outputs - 1}. "
            "Name a split with labels, or another head."
        )
    return value


def metrics_of(task: Task, outputs: int) -> tuple[str, ...]:
    """The metrics of a task: those that are asked for, or GLUE's.

    Raises:
        ConfigError: they are not those of such a head.
    """
    default = ("accuracy",) if outputs > 1 else OF_NUMBERS
    metrics = task.metrics or GLUE_METRICS.get(task.name, default)
    fitting = OF_CLASSES if outputs > 1 else OF_NUMBERS
    for metric in metrics:
        if metric not in fitting:
            raise ConfigError(
                f"the task '{task.name}' is measured by {metric}, and its head has {outputs} "
                f"output{'s' if outputs > 1 else ''}: choose of {', '.join(fitting)} with evaluator.metrics, "
                "or name another head."
            )
    return metrics


def measured(metric: str, labels: NDArray[Any], answers: NDArray[Any], outputs: int) -> float:
    """A metric of scikit-learn (accuracy, f1, mcc) or scipy (pearson, spearman).

    F1 is that of class 1 of two; of more classes it is the mean over classes. A correlation of numbers that
    are all equal is NaN.
    """
    from scipy import stats
    from sklearn import metrics

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is constant
        if metric == "accuracy":
            return float(metrics.accuracy_score(labels, answers))
        if metric == "f1":
            average = "binary" if outputs == 2 else "macro"
            return float(metrics.f1_score(labels, answers, average=average, zero_division=0))
        if metric == "mcc":
            return float(metrics.matthews_corrcoef(labels, answers))
        correlate = stats.pearsonr if metric == "pearson" else stats.spearmanr
        return float(correlate(answers, labels).statistic)


def read_head(task: Task) -> dict[str, Tensor]:
    """The tensors of a task's head, by their names in a saved model; empty where it is the model's own.

    Raises:
        ConfigError: the file cannot be read, or holds no matrix.
    """
    if task.head is None:
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with one_line(f"{task.head} cannot be read as safetensors", (SafetensorError, OSError)):
        tensors = load_file(task.head)
    if not any(tensor.ndim == 2 for tensor in tensors.values()):
        raise ConfigError(
            f"{task.head} holds no head: expected tensors such as classifier.weight [classes, width]."
        )
    return tensors


def outputs_of(head: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
    """How many outputs a head has: the rows of its smallest matrix, or those that the configuration says."""
    if head:
        return min(tensor.shape[0] for tensor in head.values() if tensor.ndim == 2)
    return len(config.get("id2label") or ()) or int(config.get("num_labels", 2))

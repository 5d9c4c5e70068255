"""The evaluator `text_classification`: classifiers of texts on GLUE-like tasks, with one head a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options, Shapes
from mecha_exp.evaluation.measurement import Measurement
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import evaluator
from mecha_exp.evaluators.common import ModelFolder, calm, check_network, folder_of, network
from mecha_exp.evaluators.common.networks import refuse_nan
from mecha_exp.evaluators.common.scores import scored
from mecha_exp.evaluators.common.tables import require_other_examples
from mecha_exp.evaluators.glue import (
    Rows,
    Task,
    measured,
    metrics_of,
    outputs_of,
    read_examples,
    read_head,
    read_tasks,
    targets,
)

__all__ = ["text_classification"]

KIND = "AutoModelForSequenceClassification"


def _check(shapes: Shapes, context: Context, options: Options) -> None:
    """Check tasks, labels, heads, tokenizer and network before anything is merged."""
    for name in ("limit", "length", "batch_size"):
        if options[name] is not None and options[name] < 1:
            raise ConfigError(f"evaluator.{name}: expected a number above 0, got {options[name]}.")
    folder = folder_of(context, options)
    texts: dict[str, list[tuple[str, str]]] = {}
    for split in ("validation", *(["test"] if options["test"] is not None else [])):
        for task in read_tasks(options, split):
            outputs, rows = outputs_of(read_head(task), folder.config), read_examples(task, options["limit"])
            metrics_of(task, outputs)
            targets(task, rows.labels, outputs, _names(task, folder))
            of_split = [*zip(rows.texts, rows.pairs or rows.texts, strict=True)]
            if (chosen_by := texts.setdefault(task.name, of_split)) is not of_split:
                require_other_examples(chosen_by, of_split, f"evaluator.test, {task.data}")
    folder.check_vocabulary(shapes)
    _length(folder, _tokenizer(folder, context, options), options)
    for task in read_tasks(options, "validation"):
        _check_head(task, shapes, folder, context, options)


def _check_head(task: Task, shapes: Shapes, folder: ModelFolder, context: Context, options: Options) -> None:
    head = read_head(task)
    whole = {**shapes, **{key: tuple(tensor.shape) for key, tensor in head.items()}}
    settings = {"num_labels": outputs_of(head, folder.config)}
    device, dtype = options["device"], options["dtype"]
    try:
        built: Any = check_network(
            folder, whole, KIND, device=device, dtype=dtype, settings=settings, context=context
        )
    except ConfigError as error:
        if task.head is None:
            raise
        raise ConfigError(f"the head of '{task.name}' in {task.head}: {error}") from None
    encoder = getattr(built, built.base_model_prefix).state_dict()
    for key in head:
        if key.removeprefix(f"{built.base_model_prefix}.") in encoder:
            raise ConfigError(
                f"the head of '{task.name}' in {task.head} has {key}, which is part of the encoder and would "
                "replace what was merged: keep the tensors of the head alone in this file."
            )


def _check_examples(shapes: Shapes, context: Context, options: Options) -> None:
    """Check that all tasks are measured by accuracy alone, which is the mean of a hit or a miss a row."""
    folder = folder_of(context, options)
    for task in read_tasks(options, "validation"):
        metrics = metrics_of(task, outputs_of(read_head(task), folder.config))
        if others := [metric for metric in metrics if metric != "accuracy"]:
            raise ConfigError(
                f"the task '{task.name}' is measured by {others[0]}, which is computed of all rows together: "
                "points race by the mean of a value for each row. Choose accuracy with evaluator.metrics, or "
                "leave evaluator.race out."
            )


def _depends(context: Context, options: Options) -> dict[str, Any]:
    tasks = read_tasks(options, "validation")
    files = {task.name: {"data": task.data, "head": task.head} for task in tasks}
    return {"model": folder_of(context, options).contents, "tasks": files}


@evaluator(
    "text_classification",
    metric="score",
    units={"score": "mean over tasks"},
    splits=("validation", "test"),
    libraries=("transformers", "sklearn", "scipy"),
    extra="text",
    check=_check,
    depends=_depends,
    fidelities=("limit",),
    takes_examples=True,
    check_examples=_check_examples,
)
def text_classification(
    state_dict: Mapping[str, Tensor],
    *,
    context: Context,
    data: Path | None = None,
    test: Path | None = None,
    tasks: str | Sequence[str | int] | Mapping[str, Mapping[str, Any] | None] | None = None,
    heads: Path | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    label: str = "label",
    labels: Sequence[str | int] | None = None,
    metrics: str | Sequence[str] | None = None,
    split: str = "validation",
    limit: int | None = None,
    length: int | None = None,
    batch_size: int = 16,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    examples: Mapping[str, list[int]] | None = None,
) -> Outcomes | Measurement:
    """Measure a classifier of texts on one task or many, each with its own head or that of the model.

    Args:
        state_dict: the weights, under the names of a saved model of transformers.
        context: its inputs have the configuration and the tokenizer.
        data: rows for `validation`: `.jsonl`, `.csv`, `.tsv`, `.parquet`, or saved `datasets`; of several
            tasks a folder with `TASK.csv` or such for each.
        test: the same for `test`; without it there are no splits.
        tasks: names, or settings by name: `data`, `head`, `text`, `text_pair`, `label`, `labels`, `metrics`.
        heads: a folder with `TASK.safetensors`: tensors by their names in a saved model, which are not merged
            and take the place of the model's own, such as `classifier.weight` [classes, width]. Their rows
            are the number of classes; one is a regression.
        text: the column of the text; None are GLUE's columns by the task's name, or `text`.
        text_pair: the column of the second text.
        label: the column of the label: a number, or the name of an output.
        labels: names of the outputs in their order; None are those of the configuration.
        metrics: of `accuracy`, `f1`, `mcc`, `pearson`, `spearman`; None are GLUE's by the task's name.
        split: `validation` or `test`.
        limit: rows of a task at most, the first ones.
        length: tokens of an example at most; None is as many as the model takes.
        batch_size: examples at once.
        model: a folder or a hub's name whose configuration and tokenizer are used in place of the inputs'.
        device: `auto`, `cpu`, `cuda:1`.
        dtype: of the network; `auto` is that of the weights.
        trust_remote_code: whether code in the model's folder may be run.
        examples: the positions of the rows to measure, by task; None is all.

    Returns:
        `score/TASK`, the mean of a task's metrics, `score`, its mean over tasks, and each metric as
        `TASK/METRIC`. The score of a task that has accuracy alone is the mean of a hit (1) or a miss (0) for
        each row; where all tasks are such ones, `score` is, too.

    Raises:
        ConfigError: rows, heads, tokenizer and network do not fit together.
        EvaluationError: a logit is NaN.
    """
    options = {**locals()}
    folder = folder_of(context, options)
    tokenizer = _tokenizer(folder, context, options)
    scores: dict[str, float] = {}
    numbers: dict[str, float] = {}
    hits: dict[str, NDArray[np.float64]] = {}
    names: dict[str, list[str]] = {}
    for task in read_tasks(options, split):
        if examples is not None and task.name not in examples:
            continue
        rows, head = read_examples(task, limit), read_head(task)
        places = range(len(rows.texts)) if examples is None else examples[task.name]
        rows = rows if examples is None else rows.among(places)
        outputs = outputs_of(head, folder.config)
        truth = targets(task, rows.labels, outputs, _names(task, folder))
        settings: dict[str, Any] = {"num_labels": outputs}
        if folder.config.get("pad_token_id") is None and tokenizer.pad_token_id is not None:
            settings["pad_token_id"] = tokenizer.pad_token_id
        built = network(folder, {**state_dict, **head}, KIND, device=device, dtype=dtype, settings=settings)
        with built as module, refuse_nan(module):
            logits = _logits(
                module, tokenizer, rows, options, _length(folder, tokenizer, options), task.name, outputs
            )
        answers = logits[:, 0] if outputs == 1 else logits.argmax(axis=1)
        chosen = metrics_of(task, outputs)
        values = {metric: measured(metric, truth, answers, outputs) for metric in chosen}
        numbers |= {f"{task.name}/{metric}": value for metric, value in values.items()}
        scores[task.name] = float(np.mean(list(values.values())))
        if chosen == ("accuracy",):
            hits[task.name] = (answers == truth).astype(np.float64)
            names[task.name] = [str(place) for place in places]
    return scored(scores, hits, names, numbers)


def _logits(
    module: Any, tokenizer: Any, rows: Rows, options: Options, length: int, task: str, outputs: int
) -> NDArray[np.float64]:
    """The logits [rows, outputs] of all examples of a task."""
    size, context = options["batch_size"], options["context"]
    places = range(len(rows.texts))
    batches = [places[start : start + size] for start in places[::size]]

    def measure(batch: range) -> list[float]:
        chosen = slice(batch.start, batch.stop)
        pairs = None if rows.pairs is None else rows.pairs[chosen]
        tokens = tokenizer(
            rows.texts[chosen], pairs, truncation=True, max_length=length, padding=size > 1,
            return_tensors="pt",
        )  # fmt: skip
        logits = module(**tokens.to(module.device)).logits.double().cpu()
        return logits.flatten().tolist()  # type: ignore[no-any-return]

    measured = context.in_parts(f"rows of {task}", batches, measure)
    return np.concatenate([np.array(part) for part in measured]).reshape(-1, outputs)


def _names(task: Task, folder: ModelFolder) -> list[str]:
    """The names of the outputs of the model's own head in the configuration, in their order."""
    if task.head is not None:
        return []
    named = folder.config.get("id2label") or {
        key: f"LABEL_{key}" for key in range(outputs_of({}, folder.config))
    }
    return [str(named[key]) for key in sorted(named, key=int)]


def _tokenizer(folder: ModelFolder, context: Context, options: Options) -> Any:
    """The tokenizer in a folder, which needs a token to fill up the shorter texts of a batch."""
    with calm(offline=context.offline):
        tokenizer = folder.tokenizer()
    if tokenizer.pad_token_id is None and options["batch_size"] > 1:
        raise ConfigError(
            f"the tokenizer in {folder.path} has no pad token, so that texts of several lengths make no "
            "batch. Set pad_token in tokenizer_config.json, or use evaluator.batch_size=1."
        )
    return tokenizer


def _length(folder: ModelFolder, tokenizer: Any, options: Options) -> int:
    """The tokens of an example at most, checked against the positions of the model."""
    config, most = folder.config, int(tokenizer.model_max_length)
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    if isinstance(positions, int):
        counts_padding = "roberta" in str(config.get("model_type")) or config.get("model_type") == "camembert"
        most = min(most, positions - (int(config.get("pad_token_id") or 0) + 1 if counts_padding else 0))
    if options["length"] is not None and options["length"] > most:
        raise ConfigError(f"evaluator.length={options['length']}: the model takes {most} tokens at most.")
    return options["length"] or most

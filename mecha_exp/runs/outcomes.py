"""`outcomes.parquet`: what evaluators saw on each example, of a run or of a whole sweep.

    pandas.read_parquet("outcomes.parquet").groupby(["split", "name", "task"]).value.mean()

Columns: `role` (`point` or `input`), `point` (its number; null for inputs, and in a run of its own), `name`
(of the point or the input), `metric` (the mean over tasks is the number of that name), `split` (`all` of an
evaluator without splits), `experts` (the number of the set of experts of the point or the input; null unless
sets are replicates), `task`, `example`, `cluster`, `value`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.outcome_table import outcomes_in, table_of
from mecha_exp.evaluation.outcomes import Names, Outcomes
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep, finished_points
from mecha_exp.system.atomic_write import atomic_write

if TYPE_CHECKING:
    import pyarrow

OUTCOMES_FILE = "outcomes.parquet"
FRESH_FILE = "fresh.parquet"
"""The outcomes of the chosen setting with seeds that had no part in the choice."""
WHOLE = "all"
"""The name of the split of an evaluator that has none."""
POINT, INPUT = "point", "input"
"""Roles: a merged model, and one that was merged."""
LABELS = ("role", "point", "name", "metric", "split", "experts")
ROWS_IN_A_GROUP = 1_000_000
"""Rows that are compressed together: what names have in common is stored once."""


@dataclass(frozen=True)
class MeasuredOutcomes:
    """The outcomes of a model by one evaluator on one split.

    Attributes:
        role: `point` or `input`.
        point: the number of the point; None for an input, and in a run of its own.
        name: of the point or the input.
        metric: the name of the mean over tasks.
        split: of the data; `all` if the evaluator has no splits.
        outcomes: by task and example.
        experts: the number of the set of experts in `models.sets`; None unless sets are replicates.
    """

    role: str
    point: int | None
    name: str
    metric: str
    split: str
    outcomes: Outcomes
    experts: int | None = None


@dataclass(frozen=True)
class ModelOutcomes:
    """The outcomes of a point or an input, by metric and split.

    Attributes:
        role: `point` or `input`.
        point: the number of the point; None for an input.
        name: of the point or the input.
        by_metric: outcomes by the name of their mean and by split.
        experts: the number of the set of experts; an input has outcomes in each set.
    """

    role: str
    point: int | None
    name: str
    by_metric: Mapping[str, Mapping[str, Outcomes]] = field(default_factory=dict)
    experts: int | None = None

    def of_metric(self, metric: str) -> Mapping[str, Outcomes]:
        """The outcomes of a metric by split; those of one task where the metric is its mean; else empty."""
        for mean, by_split in self.by_metric.items():
            if metric == mean:
                return by_split
            task = metric.removeprefix(f"{mean}/")
            if task != metric and all(task in outcomes.values for outcomes in by_split.values()):
                return {split: outcomes.of_task(task) for split, outcomes in by_split.items()}
        return {}


def write_outcomes(measured: Iterable[MeasuredOutcomes], path: Path) -> bool:
    """Write outcomes into a Parquet file; without any it is removed. Returns whether there are some."""
    remaining = iter(measured)
    first = next(remaining, None)
    if first is None:
        path.unlink(missing_ok=True)
        return False
    from pyarrow import parquet

    table = _table_of(first)
    with (
        atomic_write(path) as temporary,
        parquet.ParquetWriter(temporary, table.schema, compression="zstd") as writer,
    ):
        for group in _groups(itertools.chain([table], map(_table_of, remaining))):
            writer.write_table(group, row_group_size=group.num_rows)
    return True


def read_outcomes(path: Path) -> list[MeasuredOutcomes]:
    """The outcomes in a file that `write_outcomes` wrote, in its order.

    Raises:
        ConfigError: it is damaged, or not such a file.
    """
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        labels = [label for label in LABELS if label in file.schema_arrow.names or label != "experts"]
        is_large = file.num_row_groups > 1  # else threads take longer than the reading
        parts: list[tuple[tuple[str | int | None, ...], Outcomes]] = []
        for number in range(file.num_row_groups):  # of a large study all at once would take a gigabyte
            for values, outcomes in outcomes_in(file.read_row_group(number, use_threads=is_large), labels):
                if parts and parts[-1][0] == values:  # cut by the end of a group
                    outcomes = parts.pop()[1].followed_by(outcomes)
                parts.append((values, outcomes))
        return [
            MeasuredOutcomes(**dict(zip(labels, values, strict=True)), outcomes=outcomes)  # type: ignore[arg-type]
            for values, outcomes in parts
        ]
    except (ArrowException, OSError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read as outcomes: {error}.") from None


def models_in(measured: Iterable[MeasuredOutcomes]) -> list[ModelOutcomes]:
    """The outcomes of each point and input, by metric and split, in their order."""
    models: dict[tuple[str, int | None, str, int | None], dict[str, dict[str, Outcomes]]] = {}
    for part in measured:
        by_metric = models.setdefault((part.role, part.point, part.name, part.experts), {})
        by_metric.setdefault(part.metric, {})[part.split] = part.outcomes
    return [
        ModelOutcomes(role, point, name, by_metric, experts)
        for (role, point, name, experts), by_metric in models.items()
    ]


def collect_outcomes(folders: Mapping[Path, int], path: Path) -> bool:
    """Write the outcomes of a sweep's points, and of each input once a set; returns whether there are some.

    Args:
        folders: of the points, with their numbers.
        path: of the file.
    """
    return write_outcomes(_collected(folders), path)


def _collected(folders: Mapping[Path, int]) -> Iterator[MeasuredOutcomes]:
    inputs: dict[tuple[str, str, str, int | None], list[Outcomes]] = {}
    names: dict[tuple[str, bytes], Names] = {}
    for folder, number in folders.items():
        file = folder / OUTCOMES_FILE
        for part in read_outcomes(file) if file.is_file() else ():
            if part.role == POINT:
                yield replace(part, point=number, outcomes=_sharing(part.outcomes, names))
                continue
            earlier = inputs.setdefault((part.name, part.metric, part.split, part.experts), [])
            if not any(part.outcomes.equals(other) for other in earlier):
                earlier.append(part.outcomes)  # other files of one name are told apart by a number
                yield part if len(earlier) == 1 else replace(part, name=numbered(part.name, len(earlier)))


def _sharing(outcomes: Outcomes, names: dict[tuple[str, bytes], Names]) -> Outcomes:
    """Outcomes that share equal names with those of other files, and keep nothing else of their own file."""

    def shared(listed: Mapping[str, Names]) -> dict[str, Names]:
        kept = {task: (array.dtype.str, array.tobytes()) for task, array in listed.items()}
        return {task: names.setdefault(kept[task], array) for task, array in listed.items()}

    values = {task: array.copy() for task, array in outcomes.values.items()}
    return Outcomes.checked_before(
        values, shared(outcomes.examples), shared(outcomes.clusters), outcomes.metrics
    )


def numbered(name: str, number: int) -> str:
    """The name of an input among several files of one name, from 2 on."""
    return f"{name} ({number})"


def outcomes_of_sweep(folder: Path) -> list[ModelOutcomes]:
    """The outcomes of the points and the inputs of a sweep, or of a run; none if its evaluators give none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / OUTCOMES_FILE
    return models_in(read_outcomes(path)) if path.is_file() else []


def outcomes_so_far(
    sweep: Sweep,
    folder: Path,
    records: Mapping[Path, Record],
    *,
    ended: bool = False,
    most: int | None = None,
) -> list[ModelOutcomes]:
    """The outcomes of a sweep that may still run: from its file if it is complete, or else from its points.

    Args:
        sweep: the data that its points share.
        folder: of the sweep.
        records: of its points, by folder.
        ended: whether the sweep is known to have ended, and its outcomes to be collected.
        most: how many points are read from files of their own, which takes milliseconds each, before the
            sweep has ended once.

    Raises:
        ConfigError: a file is damaged, or there are more points to read.
    """
    if (sweep.complete or ended) and _is_the_latest(folder):
        return outcomes_of_sweep(folder)
    finished = finished_points(records)
    if most is not None and len(finished) > most and not (folder / OUTCOMES_FILE).is_file():
        raise ConfigError(
            f"the outcomes of {len(finished):,} points lie in files of their own, which are joined when the "
            "sweep ends. If it was killed, the same command ends it"
        )
    return models_in(_collected(finished))


def _is_the_latest(folder: Path) -> bool:
    """Whether the outcomes of a sweep were collected after its points were measured last."""
    path = folder / OUTCOMES_FILE
    points = (point.stat().st_mtime_ns for point in folder.glob(f"*/{OUTCOMES_FILE}"))
    return path.is_file() and max(points, default=0) <= path.stat().st_mtime_ns


def _table_of(part: MeasuredOutcomes) -> pyarrow.Table:
    return table_of(part.outcomes, **{label: getattr(part, label) for label in LABELS})


def _groups(tables: Iterable[pyarrow.Table]) -> Iterator[pyarrow.Table]:
    """The tables joined to groups of rows that are compressed together."""
    import pyarrow

    pending: list[pyarrow.Table] = []
    for table in tables:
        pending.append(table)
        if sum(part.num_rows for part in pending) >= ROWS_IN_A_GROUP:
            yield pyarrow.concat_tables(pending).unify_dictionaries()
            pending = []
    if pending:
        yield pyarrow.concat_tables(pending).unify_dictionaries()

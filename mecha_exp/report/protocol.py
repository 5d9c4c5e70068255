"""How the points of a table were measured: all alike, chosen on one part of the data, reported on another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.declaration import MERGE_PREFIXES
from mecha_exp.runs.record import FAILED, FINISHED, Record

_STALE = (
    "it was measured by an evaluator with other code, data or parameters than a later point: the same "
    "command measures it again"
)


def check_measured_alike(records: Iterable[Record]) -> None:
    """Check that each metric comes from one evaluation in all records.

    Raises:
        ConfigError: two records have a metric of one name from evaluators that differ in code, data or
            parameters.
    """
    keys: dict[str, str] = {}
    for record in records:
        for metric in record.metrics:
            key = _evaluation_of(record, metric)
            if key is not None and keys.setdefault(metric, key) != key:
                raise ConfigError(
                    f"{metric} was measured in two ways ({keys[metric]} and {key}: other code, data or "
                    "parameters of the evaluator), which do not belong into one table. Measure the points of "
                    "each sweep alike: its command again, with rerun=evaluate."
                )


def current(records: Sequence[Record]) -> list[Record]:
    """The records of a sweep; those measured otherwise than the latest one count as failed."""
    keys: dict[str, str] = {}
    measured = [record for record in records if record.status == FINISHED]
    for record in sorted(measured, key=lambda record: record.ended):
        keys.update(record.evaluations)
    return [
        record
        if all(keys.get(prefix, key) == key for prefix, key in record.evaluations.items())
        else replace(record, status=FAILED, error=_STALE, metrics={}, references={})
        for record in records
    ]


def protocol_of(records: Iterable[Record]) -> str | None:
    """A sentence on which data points were chosen and reported; None if nothing was measured."""
    measured = [r for r in records if r.status == FINISHED and r.metric]
    if not measured:
        return None
    record = measured[0]
    metric = ", ".join(record.objectives) or record.metric
    if record.split is None or record.report_split is None:
        part = f" ({record.split})" if record.split else ""
        return f"{metric}: chosen and reported on the same data{part}"
    if not any(r.reported for r in measured):
        return f"{metric}: sorted on {record.split}; nothing was measured on {record.report_split}"
    reported = f"{record.report_split}/{record.metric} is that of the chosen points and the inputs"
    return f"{metric}: sorted and chosen on {record.split}; {reported}"


def _evaluation_of(record: Record, metric: str) -> str | None:
    """The key of the evaluation that a metric comes from; None if it is one of the merge."""
    if metric.startswith(MERGE_PREFIXES):
        return None
    keys = record.evaluations | record.reported
    prefix = max((prefix for prefix in keys if metric.startswith(prefix)), key=len, default=None)
    return None if prefix is None else keys[prefix]

"""From the records of a sweep to its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mecha_exp.errors import counted
from mecha_exp.report.protocol import current
from mecha_exp.report.results import Results
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep


def results_of(sweep: Sweep, folder: Path, *, ended: bool = False) -> Results:
    """The results of a sweep so far.

    Args:
        sweep: the data that its points share.
        folder: of the sweep.
        ended: whether the sweep is known to have ended: then a point without a record has failed.
    """
    return results_from(sweep, sweep.all_records(folder, ended=ended))


def _to_come(sweep: Sweep, records: Sequence[Record]) -> list[str]:
    """A remark on the points of a sweep that have no record yet, if there are any."""
    missing = sweep.points - len(records)
    what = f"{missing} of {counted(sweep.points, 'point')} {'is' if missing == 1 else 'are'} not there yet"
    hint = "the best of all may be another one. The command of the sweep goes on with them."
    return [f"{what}: {hint}"] if missing > 0 else []


def results_from(sweep: Sweep, by_folder: Mapping[Path, Record]) -> Results:
    """The results of a sweep, from the records of its points by folder."""
    records = current([*by_folder.values()])
    named = zip(by_folder, records, strict=True)
    numbers = {id(record): int(path.name) for path, record in named if path.name.isdecimal()}

    def of(point_numbers: Sequence[int]) -> frozenset[int]:
        named = set(point_numbers)
        return frozenset(identity for identity, number in numbers.items() if number in named)

    return Results(
        sweep.title,
        sweep.swept,
        records,
        mode=sweep.mode,
        remarks=[*sweep.notes, *_to_come(sweep, records)],
        at_random=of(sweep.at_random),
        given=of(sweep.given),
        numbers=numbers,
        reference=sweep.reference,
        logarithmic=sweep.logarithmic,
        sheet=sweep.sheet,
    )

"""A sweep as data: `sweep.csv` and `sweep.parquet`, one row a point, for pandas and the like.

    pandas.read_parquet("sweep.parquet").query("status == 'FINISHED'").groupby("alpha").accuracy.mean()

Columns: `point` (its number), `name`, `status` (FINISHED, FAILED; REFERENCE for the inputs), one for each
swept key and one for each metric, `signature`, `error`. Swept keys are numbers where all their values are.
Where methods are compared, `best_of_recipe` (or `best_of_method`) is true for the best points of each.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mecha_exp.app.report.results import Results, is_number

if TYPE_CHECKING:
    import pyarrow

CSV_FILE = "sweep.csv"
PARQUET_FILE = "sweep.parquet"


def columns(results: Results) -> dict[str, list[Any]]:
    """Every column with a value, or None, for each point and then each input."""
    records, references = results.records, results.references
    blank: list[Any] = [None] * len(references)
    found: dict[str, list[Any]] = {
        "point": [*range(len(records)), *blank],
        "name": [*(r.name for r in records), *references],
        "status": [*(r.status for r in records), *("REFERENCE" for _ in references)],
    }
    for key in results.swept:
        values = [results.value(r, key) for r in records]
        if not all(is_number(v) or isinstance(v, bool) for v in values if v is not None):
            values = [results.text(r, key) or None for r in records]
        found[_free(key, found)] = [*values, *blank]
    for metric in results.metrics:
        measured = [r.metrics.get(metric) for r in records]
        found[_free(metric, found)] = [*measured, *(values.get(metric) for values in references.values())]
    if results.best_of_each is not None:
        best = {id(record) for record in results.best_of_each.records}
        name = f"best_of_{(results.method_key or '').rpartition('.')[2]}"
        found[_free(name, found)] = [*(id(record) in best for record in records), *blank]
    found["signature"] = [*(r.tags.get("signature") for r in records), *blank]
    found["error"] = [*(r.error for r in records), *blank]
    return found


def write_csv(results: Results, target: Path | TextIO) -> None:
    """Write `columns` as text, to a path or an open file; what is missing is empty, a NaN is `nan`."""
    if isinstance(target, Path):
        with target.open("w", newline="", encoding="utf-8") as file:
            write_csv(results, file)
        return
    found = columns(results)
    lines = csv.writer(target, lineterminator="\n")
    lines.writerow(found)
    lines.writerows([_text(v) for v in line] for line in zip(*found.values(), strict=True))


def write_parquet(results: Results, path: Path) -> None:
    """Write `columns` with their types: whole numbers, floats, truth values, text; missing is null."""
    from pyarrow import parquet

    parquet.write_table(_arrow(columns(results)), path)


def _arrow(found: dict[str, list[Any]]) -> pyarrow.Table:
    import pyarrow

    kinds = {int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_(), str: pyarrow.string()}
    return pyarrow.table({name: pyarrow.array(*_typed(values, kinds)) for name, values in found.items()})


def _typed(values: Sequence[Any], kinds: dict[type, Any]) -> tuple[list[Any], Any]:
    """The values as one type: that of all of them, floats where numbers are mixed, else text."""
    present = {type(value) for value in values if value is not None}
    if not present:
        return list(values), kinds[str]
    if present == {int, float}:
        present = {float}
    kind = present.pop() if len(present) == 1 else str
    return [None if value is None else kind(value) for value in values], kinds[kind]


def _text(value: Any) -> Any:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else value


def _free(name: str, taken: dict[str, list[Any]]) -> str:
    """The name of a column, made another one where there is one already."""
    return name if name not in taken else _free(f"{name}_", taken)

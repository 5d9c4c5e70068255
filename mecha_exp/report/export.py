"""A sweep as data: `sweep.csv` and `sweep.parquet`, with a row for each point, for pandas and the like.

    pandas.read_parquet("sweep.parquet").query("status == 'FINISHED'").groupby("alpha").accuracy.mean()

Columns: `point` (its number), `name`, `status` (FINISHED, FAILED, DROPPED by a race; REFERENCE for the
inputs), one for each swept key, for the recipe, each other hyperparameter with its effective value, and each
metric, `signature`, `error`. A swept key is numeric if all its values are numbers. Where points leave experts
(or blocks) out, `expert/NAME` is 1 where a point merges an expert and 0 where not, and `experts` counts them.
If several evaluators measured, `pareto` is true for the points on the Pareto front of their main metrics.
If methods are compared, `best_of_recipe` (or `best_of_method`) is true for the best points of each method.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mecha_exp.numbers import is_number
from mecha_exp.report.pareto import COLUMN, front_column
from mecha_exp.report.results import Results
from mecha_exp.report.why.factors import factor_columns
from mecha_exp.runs.record import INPUT_PREFIX, Record
from mecha_exp.runs.values import parse_value
from mecha_exp.system.atomic_write import atomic_write, replace_text
from mecha_exp.system.texts import csv_text

if TYPE_CHECKING:
    import pyarrow

CSV_FILE = "sweep.csv"
PARQUET_FILE = "sweep.parquet"
_LABELS = ("block", "expert", "subset", "blocks_merged")
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def columns(results: Results) -> dict[str, list[Any]]:
    """The columns by name, with a value or None for each point and then for each input."""
    records, references = results.records, results.references
    blank: list[Any] = [None] * len(references)
    table: dict[str, list[Any]] = {
        "point": [*range(len(records)), *blank],
        "name": [*(r.name for r in records), *references],
        "status": [
            *("DROPPED" if r.dropped is not None else r.status for r in records),
            *("REFERENCE" for _ in references),
        ],
    }
    for key in results.swept:
        table[_free(key, table)] = [*_swept_column(results, key), *blank]
    for key in _hyperparameters(records, results.swept):
        table[_free(key, table)] = [*(_plain(r.parameters.get(key)) for r in records), *blank]
    for name, column in factor_columns(results).items():
        table[_free(name, table)] = [*column, *blank]
    for metric in results.metrics:
        measured = [r.metrics.get(metric) for r in records]
        table[_free(metric, table)] = [*measured, *(values.get(metric) for values in references.values())]
    if results.best_of_each is not None:
        best = {id(record) for record in results.best_of_each.records}
        name = f"best_of_{(results.method_key or '').rpartition('.')[2]}"
        table[_free(name, table)] = [*(id(record) in best for record in records), *blank]
    if (on_front := front_column(results)) is not None:
        table[_free(COLUMN, table)] = [*on_front, *blank]
    table["signature"] = [*(r.tags.get("signature") for r in records), *blank]
    table["error"] = [*(r.error for r in records), *blank]
    return table


def _swept_column(results: Results, key: str) -> list[Any]:
    """The value of a swept key at each point; the effective one where a point sets none."""
    effective = [_plain(r.parameters.get(key)) for r in results.records]
    values = [results.value(r, key) for r in results.records]
    values = [e if v is None else v for v, e in zip(values, effective, strict=True)]
    if all(is_number(v) or isinstance(v, bool) for v in values if v is not None):
        return values
    return [results.text(r, key) or e for r, e in zip(results.records, effective, strict=True)]


def _hyperparameters(records: Sequence[Record], swept: Sequence[str]) -> list[str]:
    """The hyperparameters that were not swept, the recipe first; no inputs, no labels of points."""
    keys = dict.fromkeys(key for record in records for key in ("recipe", *record.parameters))
    recorded = [key for key in keys if any(record.parameters.get(key) is not None for record in records)]
    return [key for key in recorded if key not in {*swept, *_LABELS} and not key.startswith(INPUT_PREFIX)]


def _plain(value: Any) -> Any:
    """A number, a truth value or a text as it is; a list or a mapping as JSON."""
    if isinstance(value, list | dict):
        return json.dumps(value)
    return value


def write_csv(results: Results, target: Path | TextIO) -> None:
    """Write `columns` as CSV, to a path or an open file; None is empty, NaN is `nan`.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    text = _csv(columns(results), _cell)
    if isinstance(target, Path):
        replace_text(target, text, newline="")
    else:
        target.write(text)


def _csv(table: Mapping[str, Sequence[Any]], cell: Callable[[Any], Any]) -> str:
    return csv_text(map(cell, row) for row in (table, *zip(*table.values(), strict=True)))


def write_parquet(results: Results, path: Path) -> None:
    """Write `columns` as Parquet, typed as int, float, bool or string; None is null.

    The data are read from the text of a CSV file: for Python values pyarrow imports pandas, which takes
    longer than many sweeps.
    """
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet

    by_name = columns(results)
    data = _csv(by_name, _text).encode()
    table = arrow_csv.read_csv(
        io.BytesIO(data),
        arrow_csv.ReadOptions(use_threads=False, block_size=len(data)),
        arrow_csv.ParseOptions(newlines_in_values=True),
        arrow_csv.ConvertOptions(
            column_types={name: _kind(values) for name, values in by_name.items()},
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    with atomic_write(path) as temporary:
        parquet.write_table(table, temporary)


def _kind(values: Sequence[Any]) -> pyarrow.DataType:
    """The common type of the values: float for int and float, string for other mixtures."""
    import pyarrow

    kinds = {int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    present = {type(value) for value in values if value is not None}
    if present == {int, float}:
        return kinds[float]
    return kinds.get(present.pop(), pyarrow.string()) if len(present) == 1 else pyarrow.string()


def _cell(value: Any) -> Any:
    is_formula = isinstance(value, str) and value.startswith(_FORMULAS) and not is_number(parse_value(value))
    return f"'{value}" if is_formula else _text(value)


def _text(value: Any) -> Any:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else value


def _free(name: str, table: dict[str, list[Any]]) -> str:
    """The name of a new column, with underscores appended until it is unique."""
    return name if name not in table else _free(f"{name}_", table)

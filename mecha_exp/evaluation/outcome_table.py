"""Outcomes as tables of one row an example, in Parquet.

Columns: `task`, `example`, `cluster` (text) and `value` (float64); before them those of the labels that say
what was measured. Arrow's arrays are made from buffers: for Python values and NumPy's texts pyarrow imports
pandas, which takes longer than many sweeps.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mecha_exp.evaluation.outcomes import Names, Outcomes

if TYPE_CHECKING:
    import pyarrow

TEXTS = ("task", "example", "cluster")
VALUE, METRIC = "value", "metric"
_SHARED = 16
"""How many columns of a kind are kept: points have those of labels, tasks and examples in common."""
Label = str | int | None
Codes = NDArray[np.int32]


def encode(by_metric: Mapping[str, Outcomes]) -> bytes:
    """Outcomes by the metric that is their mean, as a Parquet file; other numbers are not in it.

    The name of the main metric may be empty; its outcomes alone need no column for it.
    """
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    is_named = any(by_metric)
    tables = [table_of(part, **({METRIC: metric} if is_named else {})) for metric, part in by_metric.items()]
    parquet.write_table(pyarrow.concat_tables(tables).unify_dictionaries(), buffer, compression="zstd")
    return buffer.getvalue()


def decode(content: bytes) -> dict[str, Outcomes]:
    """The outcomes that `encode` wrote, by metric.

    Raises:
        ValueError: the content is not that of such a file.
    """
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(io.BytesIO(content)).read()
        labels = (METRIC,) if METRIC in table.column_names else ()
        return {str(label[0]) if label else "": part for label, part in outcomes_in(table, labels)}
    except (ArrowException, OSError, KeyError) as error:
        raise ValueError(str(error)) from error


def table_of(outcomes: Outcomes, **labels: Label) -> pyarrow.Table:
    """Outcomes as a table, with the same labels in every row."""
    import pyarrow

    tasks = list(outcomes.values)
    lengths = [len(outcomes.values[task]) for task in tasks]
    columns = {name: _constant(label, sum(lengths)) for name, label in labels.items()}
    columns["task"] = _tasks(tuple(tasks), tuple(lengths))
    for name, by_task in (("example", outcomes.examples), ("cluster", outcomes.clusters)):
        texts = np.concatenate([by_task[task] for task in tasks])
        columns[name] = _words(texts.tobytes(), texts.dtype)
    values = np.concatenate([outcomes.values[task] for task in tasks])
    columns[VALUE] = _plain(pyarrow.float64(), values)
    return pyarrow.table(columns)


def outcomes_in(table: pyarrow.Table, labels: Sequence[str]) -> Iterator[tuple[tuple[Label, ...], Outcomes]]:
    """The outcomes of a table by the values of its labels, in the order of the rows.

    Rows of equal labels and tasks must follow each other, as they do in what `table_of` makes. Names that
    are equal between outcomes share their memory.

    Raises:
        KeyError: a column is missing.
    """
    columns = [_coded(table, name) for name in (*labels, *TEXTS)]
    *marks, (tasks, task_names), examples, clusters = columns
    values = _raw(table.column(VALUE).combine_chunks(), np.dtype(np.float64))
    label_starts = _starts([codes for codes, _ in marks], len(values))
    shared: dict[tuple[int, bytes], Names] = {}

    def names(which: int, column: tuple[Codes, Sequence[Any]], rows: slice) -> Names:
        codes, words = column
        key = (which, codes[rows].tobytes())
        if key not in shared:
            shared[key] = np.array([str(words[code]) for code in codes[rows]])
        return shared[key]

    for start, end in zip(label_starts, [*label_starts[1:], len(values)], strict=True):
        task_starts = start + _starts([tasks[start:end]], end - start)
        parts = {
            str(task_names[tasks[first]]): slice(first, last)
            for first, last in zip(task_starts, [*task_starts[1:], end], strict=True)
        }
        yield (
            tuple(words[codes[start]] for codes, words in marks),
            Outcomes.checked_before(
                {task: values[rows] for task, rows in parts.items()},
                {task: names(0, examples, rows) for task, rows in parts.items()},
                {task: names(1, clusters, rows) for task, rows in parts.items()},
            ),
        )


def _starts(codes: Sequence[Codes], length: int) -> NDArray[np.int64]:
    """The rows at which a value of any column changes, with the first row."""
    changes = np.zeros(length, dtype=bool)
    changes[:1] = True
    for column in codes:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def _coded(table: pyarrow.Table, name: str) -> tuple[Codes, Sequence[Any]]:
    """A column as codes, and the value of each code; missing values have one, too."""
    column = table.column(name).combine_chunks()
    encoded = column if hasattr(column, "dictionary") else column.dictionary_encode()
    words = encoded.dictionary.to_pylist()
    codes = _raw(encoded.indices, np.dtype(f"i{encoded.indices.type.bit_width // 8}")).astype(np.int32)
    if encoded.null_count:
        valid = np.frombuffer(encoded.indices.buffers()[0], dtype=np.uint8)
        bits = np.unpackbits(valid, bitorder="little")[encoded.indices.offset :][: len(codes)]
        codes[bits == 0] = len(words)
    return codes, [*words, None]


def _raw(array: pyarrow.Array, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The buffer of a plain array."""
    return np.frombuffer(array.buffers()[1], dtype)[array.offset :][: len(array)]


@lru_cache(maxsize=_SHARED)
def _constant(label: Label, length: int) -> pyarrow.Array:
    import pyarrow

    if isinstance(label, str):
        return _dictionary(np.zeros(length, dtype=np.int32), [label])
    if label is None:
        return pyarrow.nulls(length, pyarrow.int64())
    return _plain(pyarrow.int64(), np.full(length, label, dtype=np.int64))


@lru_cache(maxsize=_SHARED)
def _tasks(names: tuple[str, ...], lengths: tuple[int, ...]) -> pyarrow.Array:
    return _dictionary(np.repeat(np.arange(len(names), dtype=np.int32), lengths), names)


@lru_cache(maxsize=4)
def _words(texts: bytes, dtype: np.dtype[Any]) -> pyarrow.Array:
    unique, codes = np.unique(np.frombuffer(texts, dtype), return_inverse=True)
    return _dictionary(codes.astype(np.int32), unique.tolist())


def _dictionary(codes: Codes, words: Sequence[str]) -> pyarrow.Array:
    import pyarrow

    encoded = [word.encode() for word in words]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = (pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(encoded)))
    dictionary = pyarrow.StringArray.from_buffers(len(encoded), *buffers)
    return pyarrow.DictionaryArray.from_arrays(_plain(pyarrow.int32(), codes), dictionary)


def _plain(kind: pyarrow.DataType, values: NDArray[Any]) -> pyarrow.Array:
    import pyarrow

    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(values)])

"""Parquet files of pictures: labels are read at once, the pictures by row groups when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.documents import parse_json
from mecha_exp.errors import ConfigError, some

if TYPE_CHECKING:
    import pyarrow

PICTURE, LABEL = "image", "label"
_LABELS = (LABEL, "labels", "fine_label", "class")
_PICTURES = (PICTURE, "img", "picture")


@dataclass(frozen=True)
class Table:
    """The rows of some Parquet files.

    Attributes:
        examples: a name for each row: that of its file, and its number there.
        labels: integers, or texts.
        names: of the classes, if the files say them.
        places: the file, the row group, and the row in it, of each row.
        column: which holds the pictures.
    """

    examples: Sequence[str]
    labels: Sequence[Any]
    names: Sequence[str] | None
    places: Sequence[tuple[Path, int, int]]
    column: str

    def content(self, row: int) -> bytes:
        """The bytes of a picture."""
        file, group, place = self.places[row]
        content: bytes = _pictures(file, file.stat().st_mtime_ns, group, self.column)[place]
        return content


def read_tables(root: Path, files: Sequence[Path]) -> Table:
    """Read the labels of some Parquet files with the columns `image` and `label`.

    Raises:
        ConfigError: a file cannot be read, or has no such columns.
    """
    from pyarrow import ArrowException, parquet

    examples: list[str] = []
    labels: list[Any] = []
    places: list[tuple[Path, int, int]] = []
    names: Sequence[str] | None = None
    column = PICTURE
    for file in files:
        try:
            table = parquet.ParquetFile(file)
            column, label = _column(file, table, _PICTURES), _column(file, table, _LABELS)
            names = names or _class_names(table, label)
            labels += table.read([label]).column(0).to_pylist()
            sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        except (ArrowException, OSError) as error:
            raise ConfigError(f"{file} cannot be read as Parquet: {error}") from None
        places += [(file, group, row) for group, size in enumerate(sizes) for row in range(size)]
        name = file.relative_to(root).as_posix() if file != root else file.name
        examples += [f"{name} {row}" for row in range(sum(sizes))]
    if any(label is None for label in labels):
        raise ConfigError(f"{examples[labels.index(None)]}: this row has no label.")
    return Table(examples, labels, names, places, column)


def _column(file: Path, table: pyarrow.parquet.ParquetFile, names: Sequence[str]) -> str:
    """The first of some names that a table has a column of."""
    present = table.schema_arrow.names
    for name in names:
        if name in present:
            return name
    raise ConfigError(
        f"{file} has no column '{names[0]}' (or {', '.join(names[1:])}); its columns are {some(present)}. "
        "Rename one."
    )


def _class_names(table: pyarrow.parquet.ParquetFile, label: str) -> Sequence[str] | None:
    """The names of the classes that `datasets` writes into a file, if it did."""
    written = (table.schema_arrow.metadata or {}).get(b"huggingface")
    try:
        names = parse_json(written)["info"]["features"][label]["names"] if written else None
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(names, dict):
        names = [names[str(place)] for place in range(len(names))]
    return [str(name) for name in names] if isinstance(names, list) else None


@lru_cache(maxsize=4)
def _pictures(file: Path, changed: int, group: int, column: str) -> list[Any]:
    """The bytes of the pictures in a row group."""
    from pyarrow import parquet

    rows = parquet.ParquetFile(file).read_row_group(group, [column]).column(0).to_pylist()
    return [row["bytes"] if isinstance(row, dict) else row for row in rows]

"""The data of evaluators: rows of JSON lines, CSV, Parquet and saved `datasets`, and plain texts."""

from __future__ import annotations

import csv
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mecha_exp.documents import DocumentError, parse_json, read_json
from mecha_exp.errors import ConfigError, did_you_mean, some

Row = dict[str, Any]
KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
TEXT = ".txt"


def read_rows(path: Path, columns: tuple[str, ...] = ()) -> list[Row]:
    """The rows of a `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet` or `.arrow` file, or of a folder of them.

    A folder that `datasets` saved is one of `.arrow` files; of a saved `DatasetDict` name a split's folder.

    Args:
        columns: names that every row must have.

    Raises:
        ConfigError: a file cannot be read, has no rows, or lacks a column.
    """
    files = _files(path)
    rows = [row for file in files for row in _rows(file)]
    if not rows:
        raise ConfigError(f"{path} has no rows.")
    for column in columns:
        lacking = next((number for number, row in enumerate(rows) if column not in row), None)
        if lacking is not None:
            where = "" if lacking == 0 else f" in row {lacking}"
            raise ConfigError(f"{path} has no column '{column}'{where}.{did_you_mean(column, rows[lacking])}")
    return rows


def read_texts(
    path: Path, column: str = "text", cluster: str | None = None
) -> tuple[list[str], list[str], list[str]]:
    """The documents of a file or a folder, with a name and a cluster for each.

    Args:
        path: a `.txt` file is one document, and in a folder each of them is; of other files each row is one.
        column: that holds the text of a row.
        cluster: a column; None makes each document its own cluster.

    Returns:
        Texts, names (of a file, or the number of a row) and clusters.

    Raises:
        ConfigError: a file cannot be read, has no documents, or lacks a column.
    """
    plain = [path] if path.suffix == TEXT else sorted(path.rglob(f"*{TEXT}")) if path.is_dir() else []
    if plain:
        try:
            texts = [file.read_text(encoding="utf-8-sig") for file in plain]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as text: {error}") from None
        names = [file.relative_to(path).as_posix() if path.is_dir() else file.name for file in plain]
        return texts, names, names
    rows = read_rows(path, (column, *([cluster] if cluster else [])))
    for number, row in enumerate(rows):
        if not isinstance(row[column], str):
            kind = type(row[column]).__name__
            raise ConfigError(f"{path}: the column '{column}' holds no text in row {number}, but {kind}.")
    names = [str(number) for number in range(len(rows))]
    return [row[column] for row in rows], names, [str(row[cluster]) for row in rows] if cluster else names


def require_other_examples(
    chosen_by: Iterable[Hashable], reported_on: Iterable[Hashable], where: str
) -> None:
    """Check that points are not reported on the very examples by which they were chosen.

    Args:
        chosen_by: the examples of `validation`.
        reported_on: those of `test`.
        where: the place of the latter, for the message.

    Raises:
        ConfigError: all examples of one split are examples of the other.
    """
    validation, test = set(chosen_by), set(reported_on)
    if test <= validation or validation <= test:
        raise ConfigError(
            f"{where}: these examples are those by which points are chosen, so that their number on the test "
            "split would be too good and look honest. Name a file of other examples, or leave it out."
        )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix not in KINDS:
            raise ConfigError(f"{path}: expected a file of {', '.join(KINDS)} or {TEXT}.")
        return [path]
    splits = [child.name for child in sorted(path.iterdir()) if child.is_dir()]
    if (path / "dataset_dict.json").is_file():
        raise ConfigError(
            f"{path} holds the splits {some(splits) or 'no folder'}: name the folder of one of them."
        )
    files = [file for file in sorted(path.iterdir()) if file.suffix in (".parquet", ".arrow")]
    if not files:
        raise ConfigError(f"{path} is a folder without .parquet, .arrow or {TEXT} files.")
    return files


def _rows(file: Path) -> Iterator[Row]:
    try:
        if file.suffix in (".parquet", ".arrow"):
            yield from _of_arrow(file)
        elif file.suffix in (".csv", ".tsv"):
            with file.open(encoding="utf-8-sig", newline="") as lines:
                mark = "\t" if file.suffix == ".tsv" else ","
                yield from _of_table(file, csv.reader(lines, delimiter=mark, strict=True))
        elif file.suffix == ".json":
            content = read_json(file)
            yield from _objects(file, content if isinstance(content, list) else [content])
        else:
            yield from _objects(file, _of_lines(file))
    except csv.Error as error:
        raise ConfigError(
            f"{file} cannot be read as a table: {error}. A value that begins with a quote ends with one, and "
            "quotes in it are doubled. Files of .jsonl have no such rules."
        ) from None
    except (OSError, ValueError) as error:  # Arrow's errors are among them
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _of_table(file: Path, lines: Iterator[list[str]]) -> Iterator[Row]:
    """The rows of a table whose first line has the names of its columns."""
    names = next(lines, [])
    for number, values in enumerate(filter(None, lines)):
        if len(values) != len(names):
            raise ConfigError(
                f"{file}: row {number} has {len(values)} values, and the first line names {len(names)} "
                "columns. Put a text that has the mark between columns in it into quotes."
            )
        yield dict(zip(names, values, strict=True))


def _of_arrow(file: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    if file.suffix == ".parquet":
        yield from parquet.ParquetFile(file).read().to_pylist()
        return
    with pyarrow.memory_map(str(file)) as source:
        yield from pyarrow.ipc.open_stream(source).read_all().to_pylist()


def _of_lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield parse_json(line)
                except DocumentError as error:
                    raise ConfigError(f"{file}, line {number}: {error}") from None


def _objects(file: Path, values: Any) -> Iterator[Row]:
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: row {number} is not an object of JSON, but {type(value).__name__}.")
        yield value

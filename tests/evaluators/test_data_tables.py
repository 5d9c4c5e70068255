"""The data of evaluators, from files of every kind, with errors that name the row."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from mecha_exp.errors import ConfigError
from mecha_exp.evaluators.common.tables import read_rows, read_texts

ROWS = [{"text": "one", "label": 0}, {"text": "two", "label": 1}]


def write(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(ROWS)
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_rows_are_the_same_from_every_kind_of_file(name: str, tmp_path: Path):
    assert read_rows(write(tmp_path, name), ("text", "label")) == ROWS


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_table_of_texts_has_texts_as_values(name: str, mark: str, tmp_path: Path):
    (tmp_path / name).write_text(f"text{mark}label\none{mark}0\n")

    assert read_rows(tmp_path / name) == [{"text": "one", "label": "0"}]


def test_a_folder_of_parts_is_one_table(tmp_path: Path):
    write(tmp_path, "a.parquet")
    write(tmp_path, "b.parquet")

    assert read_rows(tmp_path) == ROWS + ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": 1}\n{', "a.jsonl, line 2: it is not JSON"),
        ("a.jsonl", "[1]", "a.jsonl: row 0 is not an object of JSON, but list"),
        ("a.jsonl", "", "a.jsonl has no rows"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"txt": "b"}',
            "a.jsonl has no column 'text' in row 1. Did you mean 'txt'?",
        ),
        ("a.jsonl", '{"text": 5}', "the column 'text' holds no text in row 0, but int"),
        ("a.parquet", "nothing", "a.parquet cannot be read"),
        ("a.arrow", "nothing", "a.arrow cannot be read"),
        (
            "a.csv",
            "label,text\n1,well, no\n",
            "row 0 has 3 values, and the first line names 2 columns. Put a",
        ),
        (
            "a.tsv",
            'text\n"so" he said\n',
            "expected after '\"'. A value that begins with a quote ends with one",
        ),
        ("a.csv", f"text\n{'a' * 140_000}\n", "field larger than field limit (131072). A value that begins"),
        ("a.xlsx", "nothing", "a.xlsx: expected a file of .jsonl, .json"),
        ("a.txt", b"\xff\xfe", "a.txt cannot be read as text"),
        ("dataset_dict.json", "{}", "holds the splits no folder: name the folder of one of them"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(name: str, content, message: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    path = tmp_path if name == "dataset_dict.json" else tmp_path / name

    with pytest.raises(ConfigError) as error:
        read_texts(path)

    assert message in str(error.value)

"""Records with another type than they should have are damaged, and the error names file and field."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from mecha_exp.errors import ConfigError
from mecha_exp.runs.record import Record, load_all
from mecha_exp.runs.sweep import Sweep

WRONG = (None, 1, 1.5, "text", [], {}, [1], {"a": None}, True, [[[]]], {"a": {"a": {}}})
SWEEP = Sweep("title", ["alpha"], ["python"], 2)


@pytest.mark.parametrize("text", ["", "null", "[]", '"text"', "1", "[" * 100_000, '{"a":' * 100_000, "\0"])
@pytest.mark.parametrize(("kind", "name"), [(Record, "run.json"), (Sweep, "sweep.json")])
def test_what_is_not_an_object_is_an_error(tmp_path: Path, kind, name: str, text: str):
    (tmp_path / name).write_text(text)

    with pytest.raises(ConfigError, match=r"is damaged|holds no sweep"):
        kind.load(tmp_path)


@pytest.mark.parametrize(
    ("saved", "name"), [(Record("a"), "run.json"), (SWEEP, "sweep.json")], ids=["run", "sweep"]
)
def test_every_field_of_another_type_is_accepted_or_named(tmp_path: Path, saved, name: str):
    saved.save(tmp_path)
    whole = json.loads((tmp_path / name).read_text())
    refused = 0
    for each in fields(saved):
        for value in WRONG:
            (tmp_path / name).write_text(json.dumps({**whole, each.name: value}))
            try:
                type(saved).load(tmp_path)
            except ConfigError as error:
                assert each.name in str(error)
                refused += 1
    assert refused > 6 * len(fields(saved))


def test_a_damaged_record_counts_as_not_made(tmp_path: Path):
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        Record(f"p{number}").save(tmp_path / str(number))
    (tmp_path / "0" / "run.json").write_text("")

    assert [record.name for record in load_all(tmp_path).values()] == ["p1"]

"""Small files that appear whole."""

import os

import pytest

from mecha_exp.system.atomic_write import atomic_write, atomic_write_text


def test_a_file_appears_whole_with_ordinary_permissions(tmp_path):
    path = tmp_path / "folder" / "run.json"
    atomic_write_text(path, "one")
    atomic_write_text(path, "two")

    assert path.read_text() == "two\n"
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]
    (tmp_path / "other").touch()
    assert os.name != "posix" or path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_after_an_error_what_was_there_is_there_alone(tmp_path):
    path = tmp_path / "run.json"
    atomic_write_text(path, "before")

    with pytest.raises(ZeroDivisionError), atomic_write(path) as file:
        file.write_text("half")
        _ = 1 / 0

    assert path.read_text() == "before\n"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]

"""The user's cache folder."""

import os
from pathlib import Path

import pytest

from mecha_exp.system.cache import (
    cache_folder,
    private_folder,
    read_checksummed,
    write_cached,
    write_checksummed,
)


def test_a_sealed_file_is_trusted_only_whole_and_under_its_name(tmp_path):
    path = tmp_path / "folder" / "loop.o"
    assert read_checksummed(path) is None
    assert write_checksummed(path, b"code")
    assert read_checksummed(path) == b"code"
    (tmp_path / "other.o").write_bytes(path.read_bytes())
    assert read_checksummed(tmp_path / "other.o") is None
    for broken in (b"", b"code", path.read_bytes()[:-1], path.read_bytes() + b"x"):
        path.write_bytes(broken)
        assert read_checksummed(path) is None


def test_what_is_kept_is_the_same_file_for_every_process(tmp_path):
    path = tmp_path / "folder" / "loop.py"

    assert write_cached(path, b"1")
    assert write_cached(path, b"2")

    assert path.read_bytes() == b"2"
    assert path.stat().st_mtime == 0
    assert [file.name for file in path.parent.iterdir()] == ["loop.py"]
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path):
    (tmp_path / "file").touch()

    assert not write_cached(tmp_path / "file" / "loop.o", b"code")


@pytest.mark.parametrize(("chosen", "expected"), [("off", None), ("here", Path("here"))])
def test_the_folder_may_be_chosen(monkeypatch, chosen, expected):
    monkeypatch.setenv("MECHA_EXP_CACHE", chosen)

    assert cache_folder() == expected


@pytest.mark.skipif(os.name != "posix", reason="other systems have other folders")
def test_the_folder_is_in_the_user_s_one(monkeypatch, tmp_path):
    monkeypatch.delenv("MECHA_EXP_CACHE", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert cache_folder() == tmp_path / "mecha_exp"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no owners of files")
def test_what_others_can_have_written_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "loop.o"
    write_checksummed(path, b"code")
    link = tmp_path / "linked" / "loop.o"
    link.parent.mkdir()
    link.symlink_to(path)

    assert read_checksummed(link) is None
    for mode in (0o602, 0o620, 0o666):
        path.chmod(mode)
        assert read_checksummed(path) is None
        assert write_checksummed(path, b"code"), "it is replaced, even where the bytes are the same"
        assert read_checksummed(path) == b"code"
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert read_checksummed(path) is None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no owners of files")
def test_code_is_kept_where_nobody_else_can_write(tmp_path, monkeypatch):
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("MECHA_EXP_CACHE", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))

    assert private_folder("loops") == shared / "loops"
    (shared / "loops").chmod(0o777)
    assert private_folder("loops") == own / "mecha_exp" / "loops"
    (shared / "loops").rmdir()
    (shared / "loops").symlink_to(tmp_path)
    assert private_folder("loops") == own / "mecha_exp" / "loops"
    (own / "mecha_exp" / "loops").chmod(0o770)
    assert private_folder("loops") is None

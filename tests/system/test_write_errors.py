"""A write that fails is said in one sentence, where it is the disk and not a bug."""

import errno
import os
from pathlib import Path

import pytest

from mecha_exp.system.atomic_write import atomic_write
from mecha_exp.system.write_errors import cause_of, write_sentence


def error(number: int, file: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), file and str(file))


def test_the_file_the_cause_and_the_cure_are_said(tmp_path):
    said = write_sentence(error(errno.ENOSPC, tmp_path / "new" / "table.csv"))

    assert said is not None
    assert said.startswith(f"{tmp_path / 'new' / 'table.csv'} cannot be written: the disk is full (")
    assert said.endswith(" free). Make room or choose another folder.")
    assert write_sentence(error(errno.EROFS, tmp_path / "x")) == (
        f"{tmp_path / 'x'} cannot be written: {tmp_path} is read-only."
    )


def test_of_an_unknown_file_no_free_space_is_told():
    assert write_sentence(error(errno.ENOSPC)) == (
        "a file cannot be written: the disk is full. Make room or choose another folder."
    )


def test_a_write_that_fails_names_its_file(tmp_path):
    """The system names none where the disk fills up in the middle."""
    with pytest.raises(OSError, match="No space") as raised, atomic_write(tmp_path / "table.csv"):
        raise error(errno.ENOSPC)

    assert (write_sentence(raised.value) or "").startswith(f"{tmp_path / 'table.csv'} cannot be written: ")


def test_a_file_that_may_have_been_read_is_not_said_to_be_written(tmp_path):
    assert write_sentence(error(errno.EMFILE, tmp_path / "x")) == (
        f"{tmp_path / 'x'} cannot be opened: too many files are open. Raise the limit with 'ulimit -n 4096'."
    )


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EPIPE, errno.ENOTDIR])
def test_what_may_be_a_bug_is_not_explained_away(tmp_path, number):
    assert write_sentence(error(number, tmp_path / "x")) is None


def test_the_room_that_is_needed_is_said(tmp_path):
    assert "(2.5 GB needed, " in (cause_of(error(errno.ENOSPC), tmp_path, 2_500_000_000) or "")
    assert cause_of(error(errno.ENOENT), tmp_path) is None

"""A writer that is stopped: what the next one finds, and what it must not trust."""

import errno
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from written import names

from mecha_exp.checkpoint import (
    CheckpointWriter,
    can_resume,
    check_writable,
    find_partial_outputs,
    positional,
)
from mecha_exp.checkpoint.safetensors import writer
from mecha_exp.checkpoint.transaction import journal, space
from mecha_exp.checkpoint.transaction.lock import TargetLock, is_in_use
from mecha_exp.checkpoint.transaction.paths import JOURNAL, LOCK, PARTIAL, disk_bytes, sibling, target_of
from mecha_exp.errors import CheckpointError

LAYOUT = dict.fromkeys(("a", "b", "c"), ("F32", (4,)))


def open_writer(folder: Path, signature: str | None = "same", **changes: object) -> CheckpointWriter:
    options = {"tensors": LAYOUT, "metadata": {}} | changes
    return CheckpointWriter(folder / "model.safetensors", **options, signature=signature)  # type: ignore[arg-type]


def make(writer: CheckpointWriter, *keys: str) -> None:
    for key in keys:
        writer.write(key, 0, torch.full((4,), float(ord(key))))
        writer.finish(key, {"of": key})


def interrupt(folder: Path, *keys: str, **changes: object) -> None:
    with pytest.raises(KeyboardInterrupt), open_writer(folder, **changes) as writer:  # type: ignore[arg-type]
        make(writer, *keys)
        raise KeyboardInterrupt


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A folder in which a writer was interrupted after two of three keys."""
    interrupt(tmp_path, "a", "b")
    return tmp_path


@pytest.fixture
def journal_file(stopped: Path) -> Path:
    return sibling(stopped / "model.safetensors", JOURNAL)


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Restarts the machine, as far as the journal can tell."""
    return lambda boot: monkeypatch.setattr(journal, "_boot", lambda: boot)


def test_an_interrupted_writer_leaves_hidden_files_and_its_lock_is_free(stopped: Path) -> None:
    assert names(stopped) == [".model.safetensors.mecha-journal", ".model.safetensors.mecha-partial"]
    assert can_resume(stopped / "model.safetensors")


def test_the_next_writer_goes_on(stopped: Path) -> None:
    with open_writer(stopped) as writer:
        assert writer.finished == {"a": {"of": "a"}, "b": {"of": "b"}}
        writer.write("a", 0, torch.zeros(4))  # is there already
        make(writer, "c")
        writer.commit()
    loaded = load_file(stopped / "model.safetensors")
    assert {key: values.tolist() for key, values in loaded.items()} == {k: [float(ord(k))] * 4 for k in "abc"}
    assert names(stopped) == ["model.safetensors"]


def test_interrupted_again_and_again_it_gets_there(tmp_path: Path) -> None:
    for done, key in enumerate("abc"):
        with pytest.raises(KeyboardInterrupt), open_writer(tmp_path) as writer:
            assert len(writer.finished) == done
            make(writer, key)
            raise KeyboardInterrupt
    with open_writer(tmp_path) as writer:
        writer.commit()
    assert names(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize(
    "changes",
    [
        {"signature": "another"},
        {"signature": None},
        {"metadata": {"recipe": "another"}},
        {"tensors": {**LAYOUT, "c": ("F16", (8,))}},
        {"tensors": {"a": ("F32", (4,))}},
    ],
    ids=str,
)
def test_something_else_starts_anew(stopped: Path, changes: dict[str, object]) -> None:
    with open_writer(stopped, **changes) as writer:  # type: ignore[arg-type]
        assert not writer.finished
        with pytest.raises(CheckpointError, match="not complete"):
            writer.commit()
    assert names(stopped) == []


def test_a_journal_without_its_file_starts_anew(stopped: Path) -> None:
    sibling(stopped / "model.safetensors", PARTIAL).unlink()
    with open_writer(stopped) as writer:
        assert not writer.finished


@pytest.mark.parametrize("damage", ["shorter", "longer", "replaced", "another header"])
def test_a_file_that_the_journal_does_not_mean_starts_anew(stopped: Path, damage: str) -> None:
    partial = sibling(stopped / "model.safetensors", PARTIAL)
    content = partial.read_bytes()
    if damage == "replaced":
        other = stopped / "other"
        other.write_bytes(content)
        other.replace(partial)
    else:
        damaged = {"shorter": content[:-1], "longer": content + b"\0", "another header": b"\1" + content[1:]}
        partial.write_bytes(damaged[damage])
    with open_writer(stopped) as writer:
        assert not writer.finished
        make(writer, "a", "b", "c")
        writer.commit()
    assert names(stopped) == ["model.safetensors"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\0" * 200, b"{}\n", b"99914b93 {}\n", b"8bdb6972 12\n"])
def test_a_journal_that_makes_no_sense_starts_anew(stopped: Path, journal_file: Path, content: bytes) -> None:
    journal_file.write_bytes(content)
    with open_writer(stopped) as writer:
        assert not writer.finished


def test_a_torn_journal_is_good_up_to_the_tear(stopped: Path, journal_file: Path) -> None:
    content = journal_file.read_bytes()
    inode = sibling(stopped / "model.safetensors", PARTIAL).stat().st_ino
    for size in range(len(content)):
        journal_file.write_bytes(content[:size])
        found = journal.read_journal(journal_file, "same", inode)
        whole = content[:size].count(b"\n")
        assert list(found.keys) == list("ab")[: max(0, whole - 2)]  # the first lines: what it is of, and 0


def test_a_flipped_bit_ends_the_journal(stopped: Path, journal_file: Path) -> None:
    journal_file.write_bytes(journal_file.read_bytes().replace(b'"of": "b"', b'"of": "c"'))
    with open_writer(stopped) as writer:
        assert list(writer.finished) == ["a"]


# --- a restart of the machine -----------------------------------------------------------------------------


@pytest.mark.parametrize("boot", ["another", None])
def test_after_a_restart_only_what_was_flushed_counts(
    tmp_path: Path, restarted: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch, boot: str | None
) -> None:
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path) as stopped:
        make(stopped, "a")
        monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.0)
        make(stopped, "b")
        monkeypatch.setattr(writer, "FLUSH_SECONDS", 1e9)
        make(stopped, "c")
        raise KeyboardInterrupt
    restarted(boot)
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path) as next_one:
        assert list(next_one.finished) == ["a", "b"]
        make(next_one, "c")
        raise KeyboardInterrupt
    restarted("a third")
    with open_writer(tmp_path) as last:
        assert list(last.finished) == ["a", "b"]


def test_what_was_never_flushed_is_lost_in_a_restart(
    stopped: Path, restarted: Callable[[str | None], None]
) -> None:
    restarted("another")
    with open_writer(stopped) as writer:
        assert not writer.finished


def test_a_writer_that_is_not_durable_never_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_: int) -> None:
        raise AssertionError("flushed")

    monkeypatch.setattr(writer, "_flush_data", forbidden)
    monkeypatch.setattr(os, "fsync", forbidden)
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.0)
    with open_writer(tmp_path, durable=False) as made:
        make(made, "a", "b", "c")
        made.commit()


def test_a_durable_writer_waits_for_the_disk_before_the_model_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append((tmp_path / "model.safetensors").exists()))
    with open_writer(tmp_path) as made:
        make(made, "a", "b", "c")
        made.commit()
    assert flushed[0] is False  # the data, then the folder in which it has got its name
    assert flushed[-1] is True


# --- errors -----------------------------------------------------------------------------------------------


def test_after_an_error_nothing_is_kept(stopped: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_writer(stopped) as writer:
        make(writer, "c")
        _ = 1 / 0
    assert names(stopped) == []


def test_without_a_signature_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    interrupt(tmp_path, "a", signature=None)
    assert names(tmp_path) == []


def test_an_interrupt_before_the_first_key_leaves_nothing(tmp_path: Path) -> None:
    interrupt(tmp_path)
    assert names(tmp_path) == []


def test_an_interrupt_while_the_writer_opens_keeps_what_an_earlier_one_did(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_begins_with", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            open_writer(stopped)
    with open_writer(stopped) as next_one:
        assert list(next_one.finished) == ["a", "b"]


def test_a_key_with_a_hole_is_not_finished(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write("a", 1, torch.zeros(3))
        with pytest.raises(CheckpointError, match=r"a is not finished, 12 of 16 bytes"):
            writer.finish("a")
        with pytest.raises(CheckpointError, match="no key 'd'"):
            writer.finish("d")


@pytest.mark.skipif(not positional.POSITIONAL, reason="os.pwrite is not used here")
def test_a_full_disk_leaves_nothing(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="the disk is full"), open_writer(stopped) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        make(writer, "c")
    assert names(stopped) == []


def test_the_room_of_the_partial_file_is_not_asked_for_twice(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = stopped / "model.safetensors"
    held = disk_bytes(sibling(target, PARTIAL))
    usage = space.shutil.disk_usage(stopped)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: usage._replace(free=0))
    check_writable(target, held)
    with pytest.raises(CheckpointError, match="full"):
        check_writable(target, held + 1)


def test_a_writer_is_left_only_when_nobody_writes_any_more(tmp_path: Path) -> None:
    made = open_writer(tmp_path)
    with made._in_use():
        closing = threading.Thread(target=made.suspend)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
    closing.join(10)
    assert not closing.is_alive()
    with pytest.raises(CheckpointError, match="closed"):
        made.write("a", 0, torch.zeros(4))


# --- leftovers --------------------------------------------------------------------------------------------


def test_hidden_files_are_known_by_their_names() -> None:
    target = Path("out") / "model.safetensors"
    assert {target_of(sibling(target, kind)) for kind in (PARTIAL, JOURNAL, LOCK)} == {target}
    for other in ("model.safetensors", ".model.lock", ".x.mecha-else", "x.mecha-lock", ".mecha-lock"):
        assert target_of(Path("out", other)) is None


def test_leftovers_are_found_and_removed(stopped: Path) -> None:
    (leftover,) = find_partial_outputs([stopped, stopped / ".." / stopped.name])
    assert leftover.target == stopped.resolve() / "model.safetensors"
    assert leftover.nbytes == sum(disk_bytes(path) for path in stopped.iterdir())
    assert not leftover.in_use
    leftover.remove()
    assert names(stopped) == []
    assert find_partial_outputs([stopped]) == []


def test_what_a_living_process_writes_is_not_removed(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        (leftover,) = find_partial_outputs([tmp_path])
        assert leftover.in_use
        with pytest.raises(CheckpointError, match="is being written"):
            leftover.remove()
        make(writer, "a", "b", "c")
        writer.commit()


@pytest.mark.parametrize("where", [".hidden", "environment"])
def test_hidden_folders_and_environments_are_left_alone(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "project" / where
    folder.mkdir(parents=True)
    interrupt(folder, "a")
    if where == "environment":
        (folder / "pyvenv.cfg").touch()
    assert find_partial_outputs([tmp_path]) == []
    assert len(find_partial_outputs([folder])) == 1


KILLED = """
import os, sys, torch
from mecha_exp.checkpoint import CheckpointWriter
writer = CheckpointWriter(sys.argv[1], {"a": ("F32", (4,)), "b": ("F32", (4,))}, {}, signature="same")
writer.write("a", 0, torch.ones(4))
writer.finish("a")
os._exit(9)
"""


def test_a_killed_writer_is_gone_on_with(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert subprocess.run([sys.executable, "-c", KILLED, target], check=False).returncode == 9
    assert not find_partial_outputs([tmp_path])[0].in_use
    with CheckpointWriter(target, dict.fromkeys("ab", ("F32", (4,))), {}, signature="same") as writer:
        assert list(writer.finished) == ["a"]
        writer.write("b", 0, torch.ones(4))
        writer.commit()
    assert load_file(target)["a"].tolist() == [1, 1, 1, 1]


def test_a_lock_that_stays_empty_is_of_a_process_that_was_killed_while_it_made_it(tmp_path: Path) -> None:
    sibling(tmp_path / "model.safetensors", LOCK).touch()
    open_writer(tmp_path).abort()
    assert names(tmp_path) == []


def test_a_lock_that_is_empty_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    lock = sibling(tmp_path / "model.safetensors", LOCK)
    lock.touch()
    named = threading.Timer(0.05, lock.write_text, [json.dumps({"pid": 1, "host": "elsewhere"})])
    named.start()
    with pytest.raises(CheckpointError, match="being written by process 1 on elsewhere"):
        open_writer(tmp_path)
    named.join()


def test_a_writer_that_is_stopped_while_it_renews_the_journal_keeps_the_old_one(tmp_path, monkeypatch):
    interrupt(tmp_path, "a", "b")

    def stopped(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", stopped)
        open_writer(tmp_path)

    sibling(tmp_path / "model.safetensors", LOCK).unlink(missing_ok=True)  # as when its process is gone
    with open_writer(tmp_path) as again:
        assert set(again.finished) == {"a", "b"}
        make(again, "c")
        again.commit()
    assert names(tmp_path) == ["model.safetensors"]


HOLDER = """
import sys, time
from pathlib import Path
from mecha_exp.checkpoint.transaction.lock import TargetLock
lock = TargetLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_holder_that_is_killed_frees_the_lock(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    command = [sys.executable, "-c", HOLDER, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert is_in_use(target)
        with pytest.raises(CheckpointError, match=f"is being written by process {holder.pid} on "):
            TargetLock(target)
        holder.kill()
    assert not is_in_use(target)
    TargetLock(target).release()
    assert names(tmp_path) == []


CONTENDER = """
import sys
from pathlib import Path
from mecha_exp.checkpoint.transaction.lock import TargetLock
from mecha_exp.errors import CheckpointError
target, holders = Path(sys.argv[1]), Path(sys.argv[2])
held = 0
while held < 300:
    try:
        lock = TargetLock(target)
    except CheckpointError:
        continue
    held += 1
    holders.mkdir()  # an error where another process holds the lock too
    holders.rmdir()
    lock.release()
"""


def test_of_two_processes_that_contend_one_holds_the_lock(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    sibling(target, LOCK).write_text(json.dumps({"pid": 2**31 - 1, "host": platform.node()}))  # left behind
    command = [sys.executable, "-c", CONTENDER, target, tmp_path / "holders"]
    contenders = [subprocess.Popen(command) for _ in range(2)]
    assert [contender.wait(60) for contender in contenders] == [0, 0]
    assert names(tmp_path) == []

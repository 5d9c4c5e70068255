"""Reading and writing tensors tile by tile: the same bytes, whatever the tiles, threads and platform."""

import errno
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from written import names

from mecha_exp.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    check_writable,
    dtype_name,
    positional,
    torch_dtype,
)
from mecha_exp.checkpoint.dtypes import FORMATS
from mecha_exp.checkpoint.transaction import space
from mecha_exp.errors import CheckpointError

DTYPES = [torch_dtype(name) for name, entry in FORMATS.items() if entry.torch is not None]
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions and limits")


@pytest.fixture(params=["positional", "portable"])
def any_platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Once with the calls of this platform, once with those that every platform has."""
    if request.param == "portable":
        monkeypatch.setattr(positional, "POSITIONAL", False)
    yield


def some_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Arbitrary bits, so that NaNs, infinities and denormals are among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw_a, raw_b = a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_a, raw_b)


def described(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (dtype_name(value.dtype), tuple(value.shape)) for key, value in tensors.items()}


def write_all(path: Path, tensors: dict[str, torch.Tensor], tile: int = 1 << 18) -> Path:
    with CheckpointWriter(path, described(tensors), {}, durable=False) as writer:
        for key, value in tensors.items():
            flat = value.reshape(-1)
            for start in range(0, len(flat), tile):
                writer.write(key, start, flat[start : start + tile])
        return writer.commit()


# --- round trips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("any_platform")
def test_every_dtype_is_read_and_written_like_safetensors_does(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7, 5)]
    tensors = {f"t{i}": some_tensor(dtype, shape, i) for i, shape in enumerate(shapes)}
    save_file(tensors, tmp_path / "theirs.safetensors")
    ours = load_file(write_all(tmp_path / "ours.safetensors", tensors, tile=4))
    with Checkpoint(tmp_path / "theirs.safetensors") as checkpoint:
        assert set(checkpoint.keys()) == set(tensors)
        for key, expected in tensors.items():
            assert same_bits(checkpoint.read(key), expected)
            assert same_bits(ours[key], expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tensors=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
            lambda key: key != "__metadata__"
        ),
        st.builds(
            some_tensor,
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 6), max_size=3).map(tuple),
            st.integers(0, 99),
        ),
        max_size=6,
    ),
    tile=st.integers(1, 300),
)
def test_any_state_dict_survives(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor], tile: int
) -> None:
    path = write_all(tmp_path_factory.getbasetemp() / "any.safetensors", tensors, tile)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    with Checkpoint(path) as checkpoint:
        for key, expected in tensors.items():
            assert same_bits(loaded[key], expected)
            assert same_bits(checkpoint.read(key), expected)


@pytest.mark.usefixtures("any_platform")
def test_four_threads_write_the_bytes_that_one_writes(tmp_path: Path) -> None:
    tensors = {f"k{i}": some_tensor(torch.float16, (123, 457), i) for i in range(6)}
    expected = write_all(tmp_path / "one.safetensors", tensors).read_bytes()
    tiles = [(key, start) for key in tensors for start in range(0, 123 * 457, 1000)]

    with CheckpointWriter(tmp_path / "four.safetensors", described(tensors), {}) as writer:

        def write(tile: tuple[str, int]) -> None:
            key, start = tile
            writer.write(key, start, tensors[key].reshape(-1)[start : start + 1000])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, reversed(tiles)))
        writer.commit()
    assert (tmp_path / "four.safetensors").read_bytes() == expected


@pytest.mark.usefixtures("any_platform")
def test_four_threads_read_the_same_tiles(tmp_path: Path) -> None:
    values = some_tensor(torch.float16, (100_003,))
    path = write_all(tmp_path / "model.safetensors", {"w": values})
    with Checkpoint(path) as checkpoint, ThreadPoolExecutor(4) as pool:

        def read(start: int) -> torch.Tensor:
            out = torch.empty(min(777, len(values) - start), dtype=torch.float16)
            checkpoint.read_into("w", start, out)
            return out

        tiles = list(pool.map(read, range(0, len(values), 777)))
    assert same_bits(torch.cat(tiles), values)


@pytest.mark.usefixtures("any_platform")
def test_reads_and_writes_cut_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positional, "_CHUNK", 7)
    values = some_tensor(torch.bfloat16, (101,))
    with Checkpoint(write_all(tmp_path / "model.safetensors", {"w": values})) as checkpoint:
        assert same_bits(checkpoint.read("w"), values)


def test_packed_numbers_are_copied_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "packed.safetensors"
    with CheckpointWriter(path, {"w": ("F4", (5, 2)), "v": ("F6_E2M3", (4,))}, {}) as writer:
        writer.write_bytes("w", 2, memoryview(b"345"))
        writer.write_bytes("w", 0, memoryview(b"12"))
        writer.write_bytes("v", 0, memoryview(b"abc"))
        writer.commit()
    with Checkpoint(path) as checkpoint:
        raw = bytearray(checkpoint.info("w").nbytes)
        checkpoint.read_bytes_into("w", 0, memoryview(raw))
        assert raw == b"12345"
        with pytest.raises(CheckpointError, match=r"packed\.safetensors: w: torch has no dtype for F4"):
            checkpoint.read("w")


# --- reading what does not fit, or changes ---------------------------------------------------------------


def test_wrong_reads_name_the_key(tmp_path: Path) -> None:
    path = write_all(tmp_path / "model.safetensors", {"weight": torch.zeros(10)})
    with Checkpoint(path) as checkpoint:
        assert "weight" in checkpoint
        assert "bias" not in checkpoint
        with pytest.raises(CheckpointError, match=r"no key 'wieght'\. Did you mean 'weight'"):
            checkpoint.read("wieght")
        with pytest.raises(CheckpointError, match=r"weight is F32, which cannot fill a 1-D .*float16"):
            checkpoint.read_into("weight", 0, torch.empty(4).half())
        with pytest.raises(CheckpointError, match="cannot fill a 2-D"):
            checkpoint.read_into("weight", 0, torch.empty(2, 2))
        with pytest.raises(CheckpointError, match="contiguous"):
            checkpoint.read_into("weight", 0, torch.empty(8)[::2])
        for start in (-1, 7, 11):
            with pytest.raises(CheckpointError, match="weight has 10 elements"):
                checkpoint.read_into("weight", start, torch.empty(4))


def test_a_closed_checkpoint_does_not_read_another_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_all(tmp_path / "model.safetensors", {"w": torch.zeros(10)}))
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.read("w")


@pytest.mark.usefixtures("any_platform")
def test_a_file_that_shrinks_is_an_error_and_no_garbage(tmp_path: Path) -> None:
    path = write_all(tmp_path / "model.safetensors", {"w": torch.ones(1000)})
    with Checkpoint(path) as checkpoint:
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(CheckpointError, match="100 too early: it was changed"):
            checkpoint.read("w")


def test_a_change_of_the_file_is_seen(tmp_path: Path) -> None:
    path = write_all(tmp_path / "model.safetensors", {"w": torch.ones(10)})
    with Checkpoint(path) as checkpoint:
        checkpoint.check_unchanged()
        os.utime(path, ns=(0, 0))
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            checkpoint.check_unchanged()


@posix_only
def test_a_replaced_or_removed_file_is_seen(tmp_path: Path) -> None:
    path = write_all(tmp_path / "model.safetensors", {"w": torch.ones(10)})
    with Checkpoint(path) as checkpoint:
        write_all(path, {"w": torch.zeros(10)})
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            checkpoint.check_unchanged()
        assert torch.equal(checkpoint.read("w"), torch.ones(10))
        path.unlink()
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            checkpoint.check_unchanged()


def test_big_endian_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(CheckpointError, match="big-endian"):
        Checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="big-endian"):
        CheckpointWriter(tmp_path / "model.safetensors", {}, {})


# --- a file is complete, or does not exist ---------------------------------------------------------------

ONE = {"w": ("F32", (4,))}


def test_nothing_is_at_the_target_before_the_commit(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "model.safetensors"
    with CheckpointWriter(target, ONE, {"recipe": "…"}) as writer:
        writer.write("w", 0, torch.arange(4.0))
        assert not target.exists()
        assert all(
            name.startswith(".") and not name.endswith(".safetensors") for name in names(target.parent)
        )
        assert writer.commit() == target
    assert names(target.parent) == ["model.safetensors"]
    assert load_file(target)["w"].tolist() == [0, 1, 2, 3]


@posix_only
def test_the_file_has_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    path = write_all(tmp_path / "model.safetensors", {"w": torch.zeros(1)})
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)


def test_a_failure_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    target = write_all(tmp_path / "model.safetensors", {"old": torch.ones(3)})
    before = target.read_bytes()
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(target, ONE, {}) as writer:
        writer.write("w", 0, torch.zeros(4))
        raise KeyboardInterrupt
    with CheckpointWriter(target, ONE, {}):
        pass  # left without a commit
    with CheckpointWriter(target, ONE, {}) as writer:
        writer.abort()
        writer.abort()
        with pytest.raises(CheckpointError, match="this writer is closed"):
            writer.write("w", 0, torch.zeros(4))
    assert target.read_bytes() == before
    assert names(tmp_path) == ["model.safetensors"]


def test_abort_after_commit_keeps_the_file(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model.safetensors", {}, {}) as writer:
        target = writer.commit()
        writer.abort()
        with pytest.raises(CheckpointError, match="closed"):
            writer.commit()
    assert load_file(target) == {}


@pytest.mark.parametrize(
    ("tiles", "count"), [([(0, 3)], "12 of 16"), ([(0, 4), (1, 2)], "24 of 16"), ([], "0 of 16")]
)
def test_a_commit_with_missing_or_doubled_bytes_is_refused(
    tmp_path: Path, tiles: list[tuple[int, int]], count: str
) -> None:
    with CheckpointWriter(tmp_path / "model.safetensors", {**ONE, "v": ("F32", ())}, {}) as writer:
        writer.write("v", 0, torch.zeros(1))
        for start, size in tiles:
            writer.write("w", start, torch.zeros(size))
        with pytest.raises(CheckpointError, match=rf"not complete, nothing was saved: w \({count} bytes\)"):
            writer.commit()
    assert names(tmp_path) == []


def test_wrong_writes_name_the_key(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model.safetensors", ONE, {}) as writer:
        with pytest.raises(CheckpointError, match=r"no key 'v'\. Known: w"):
            writer.write("v", 0, torch.zeros(4))
        with pytest.raises(CheckpointError, match=r"float16 cannot be written to w, which is F32"):
            writer.write("w", 0, torch.zeros(4).half())
        with pytest.raises(CheckpointError, match="a 2-D tensor"):
            writer.write("w", 0, torch.zeros(2, 2))
        for start in (-1, 1, 5):
            with pytest.raises(CheckpointError, match="w has 16 bytes"):
                writer.write("w", start, torch.zeros(4))
        writer.write("w", 0, torch.arange(8.0)[::2])  # any stride will do
        writer.commit()


# --- two writers, and writers that were killed -----------------------------------------------------------

KILLED = """
import os, sys
from mecha_exp.checkpoint import CheckpointWriter
writer = CheckpointWriter(sys.argv[1], {"w": ("F32", (4,))}, {})
os._exit(9)
"""


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_a_second_writer_of_the_same_file_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    with CheckpointWriter(target, ONE, {}) as first:
        with pytest.raises(CheckpointError, match=rf"being written by process {os.getpid()} on .*delete"):
            CheckpointWriter(target, ONE, {})
        first.write("w", 0, torch.ones(4))
        first.commit()
    assert load_file(target)["w"].tolist() == [1, 1, 1, 1]
    assert names(tmp_path) == ["model.safetensors"]


def test_the_next_writer_clears_up_after_one_that_was_killed(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert run_python(KILLED, target).returncode == 9
    assert len(names(tmp_path)) == 2
    with CheckpointWriter(target, ONE, {}) as writer:
        writer.write("w", 0, torch.ones(4))
        writer.commit()
    assert names(tmp_path) == ["model.safetensors"]


@pytest.fixture(scope="module")
def stale_lock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What is in the lock file of a writer that was killed."""
    folder = tmp_path_factory.mktemp("killed")
    run_python(KILLED, folder / "model.safetensors")
    found: dict[str, object] = json.loads((folder / ".model.safetensors.mecha-lock").read_text())
    return found


@pytest.mark.parametrize(
    "changed",
    [{"host": "elsewhere"}, {"pid": -1}, {"pid": True}, {"pid": "1"}, {"pid": 2**99}],
    ids=str,
)
def test_a_lock_that_cannot_be_judged_is_respected(
    tmp_path: Path, stale_lock: dict[str, object], changed: dict[str, object]
) -> None:
    lock = tmp_path / ".model.safetensors.mecha-lock"
    lock.write_text(json.dumps(stale_lock | changed))
    with pytest.raises(CheckpointError, match=r"is being written by .*delete .*mecha-lock"):
        CheckpointWriter(tmp_path / "model.safetensors", ONE, {})
    assert lock.exists()


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "[" * 100_000])
def test_a_lock_that_cannot_be_read_is_respected(tmp_path: Path, text: str) -> None:
    (tmp_path / ".model.safetensors.mecha-lock").write_text(text)
    with pytest.raises(CheckpointError, match="is being written by another process"):
        CheckpointWriter(tmp_path / "model.safetensors", ONE, {})


def test_the_process_id_of_a_former_life_is_no_owner(tmp_path: Path, stale_lock: dict[str, object]) -> None:
    ours = stale_lock | {"pid": os.getpid()}  # as in a container that was started again
    (tmp_path / ".model.safetensors.mecha-lock").write_text(json.dumps(ours))
    CheckpointWriter(tmp_path / "model.safetensors", ONE, {}).abort()
    assert names(tmp_path) == []


# --- no room, no right -----------------------------------------------------------------------------------

TOO_BIG = {"w": ("U8", (1 << 60,))}


@pytest.mark.parametrize("attempt", ["check", "write"])
def test_a_file_larger_than_the_disk_is_refused_before_the_work(tmp_path: Path, attempt: str) -> None:
    target = tmp_path / "new" / "model.safetensors"
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors .*full \(1152921\.5 TB needed, .* [TGMk]?B free"
    ):
        check_writable(target, 1 << 60) if attempt == "check" else CheckpointWriter(target, TOO_BIG, {})
    assert names(tmp_path) == []


LIMITED = """
import resource, sys
from mecha_exp.checkpoint import CheckpointWriter
from mecha_exp.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    CheckpointWriter(sys.argv[1], {"w": ("U8", (200_000,))}, {})
except CheckpointError as error:
    sys.exit(str(error))
"""


@posix_only
def test_a_limit_of_the_file_size_is_an_error_before_the_work(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    target.write_text("the former one")
    done = run_python(LIMITED, target)
    assert "cannot be written: the file is larger than its file system or 'ulimit -f' allows" in done.stderr
    assert target.read_text() == "the former one"
    assert names(tmp_path) == ["model.safetensors"]


@posix_only
@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the file cannot be given its room at once")
def test_file_systems_that_cannot_preallocate_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    values = some_tensor(torch.float32, (1000,))
    assert same_bits(load_file(write_all(tmp_path / "model.safetensors", {"w": values}))["w"], values)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say where a file lies")
def test_a_file_on_a_memory_disk_is_given_its_room_by_those_who_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, start, nbytes: taken.append(nbytes))
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(space, "_MOUNTS", mounts)
    values = some_tensor(torch.float32, (1000,))
    for kind in ("ext4", "tmpfs"):
        mounts.write_text(f"1 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} {kind} rw\n")
        path = write_all(tmp_path / f"{kind}.safetensors", {"w": values})
        assert same_bits(load_file(path)["w"], values)
    assert taken == [(tmp_path / "ext4.safetensors").stat().st_size]


@pytest.mark.skipif(not positional.POSITIONAL, reason="os.pwrite is not used here")
def test_a_disk_that_fills_up_during_the_work_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with CheckpointWriter(tmp_path / "model.safetensors", ONE, {}) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"the disk is full .*Make room"):
            writer.write("w", 0, torch.zeros(4))
    assert names(tmp_path) == []


def test_check_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder" / "model.safetensors", 10)
    (tmp_path / "there").write_text("kept")
    check_writable(tmp_path / "there", 10)
    assert names(tmp_path) == ["there"]
    assert (tmp_path / "there").read_text() == "kept"


@pytest.mark.parametrize("attempt", ["check", "write"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("a_file/model.safetensors", "a_file is not a folder"),
        ("a_file/deeper/model.safetensors", "a_file is not a folder"),
        ("a\0name", "is not a file name"),
        ("a_folder", "a_folder is a folder: name the file"),
        pytest.param("a_device", "a device", marks=posix_only),
    ],
)
def test_a_target_that_cannot_be_a_file_is_refused(
    tmp_path: Path, target: str, message: str, attempt: str
) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "a_folder").mkdir()
    if sys.platform != "win32":
        (tmp_path / "a_device").symlink_to("/dev/null")
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        check_writable(tmp_path / target, 1) if attempt == "check" else CheckpointWriter(
            tmp_path / target, ONE, {}
        )
    assert names(tmp_path) == before


@posix_only
def test_a_folder_without_write_permission_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(CheckpointError, match="no permission to write"):
            check_writable(tmp_path / "model.safetensors", 1)
    finally:
        tmp_path.chmod(0o700)


def test_the_data_are_where_the_header_says(tmp_path: Path) -> None:
    content = write_all(tmp_path / "model.safetensors", {"w": torch.tensor([1.5, -2.0])}).read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    assert start % 64 == 0
    assert struct.unpack("<2f", content[start:]) == (1.5, -2.0)


def cut(partial: Path) -> None:
    os.truncate(partial, 4096)


def cut_and_extended(partial: Path) -> None:
    size = partial.stat().st_size
    os.truncate(partial, 4096)
    os.truncate(partial, size)


def overwritten(partial: Path) -> None:
    with partial.open("r+b") as file:
        file.write(b"\0" * 100)


def exchanged(partial: Path) -> None:
    content = partial.read_bytes()
    partial.unlink()
    partial.write_bytes(content)


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be changed there")
@pytest.mark.parametrize("harm", [cut, cut_and_extended, overwritten, exchanged, Path.unlink])
def test_a_partial_file_that_another_process_changes_is_not_committed(tmp_path: Path, harm):
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"old")
    size = 1 << 18

    with (
        pytest.raises(CheckpointError, match=r"another process changed .*mecha-partial while it was written"),
        CheckpointWriter(target, {"a": ("F32", (size,)), "b": ("F32", (size,))}, {}) as writer,
    ):
        writer.write("a", 0, torch.ones(size))
        harm(tmp_path / ".model.safetensors.mecha-partial")
        writer.write("b", size // 2, torch.ones(size // 2))
        writer.write("b", 0, torch.ones(size // 2))
        writer.commit()

    assert target.read_bytes() == b"old"

"""Looks an address up and writes its stand-ins: headers by ranges, small files as a whole."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from mecha_exp.checkpoint.remote.address import NOT_IN_PARTS, name_of
from mecha_exp.checkpoint.remote.pin import Pin, Store
from mecha_exp.checkpoint.remote.retries import read_all
from mecha_exp.checkpoint.remote.stand_in import ADDRESS, LEFT_OUT, StandIn, stand_ins
from mecha_exp.checkpoint.remote.stores import store_at
from mecha_exp.checkpoint.safetensors.header import INDEX, MAX_HEADER_BYTES, SUFFIX, begins_as_safetensors
from mecha_exp.documents import read_json, typed
from mecha_exp.errors import CheckpointError, some
from mecha_exp.families import SMALL_SUFFIXES
from mecha_exp.system.atomic_write import atomic_write
from mecha_exp.system.texts import json_hash

FIRST_BYTES = 1 << 13
"""Bytes of the first read of a file, which most headers of shards fit in."""
FETCHED_AT_ONCE = 1 << 17
"""Bytes of the largest small file that is fetched with the headers. Larger ones wait until they are read."""
SMALL = 64_000_000
"""Bytes of the largest small file."""

_SMALL_NAMES = ("LICENSE", "README.md")
_known: dict[str, Path] = {}
"""What was looked up by this process, by address: it sees each model in one state."""


def look_up(address: str) -> Path:
    """The file or folder that stands for an address.

    Raises:
        CheckpointError: there is no such model, it cannot be read from elsewhere, or the cache is off.
    """
    path = _known.get(address)
    if path is None or not path.exists():
        path = _known[address] = _stand_in(address)
    return path


def forget_lookups() -> None:
    """Forget what was looked up, since something has changed."""
    _known.clear()


def fetch_small_files(folder: Path) -> None:
    """Fetch the small files of a folder of stand-ins that were left out; does nothing in any other folder."""
    note = folder / LEFT_OUT
    if not note.is_file() or (root := stand_ins()) is None or root not in folder.parents:
        return
    for name, pin in typed(read_json(note), dict[str, Pin]).items():
        target = folder / name
        if not target.exists():
            with atomic_write(target) as temporary:
                temporary.write_bytes(_content(store_at(pin.address), pin))


def _stand_in(address: str) -> Path:
    root = stand_ins()
    if root is None:
        raise CheckpointError(
            f"{address}: models that lie elsewhere need the cache folder, and MECHA_EXP_CACHE turns it off."
        )
    name, store = name_of(address), store_at(address)
    pins = _readable(store.files(address), address)
    listed = [address, [(name, pin.entry()) for name, pin in sorted(pins.items())]]
    digest = json_hash(listed)[:24]
    folder = root / digest
    if not folder.is_dir():
        _write(folder, name, address, pins, store)
    return folder / name


def _write(folder: Path, name: str, address: str, pins: Mapping[str, Pin], store: Store) -> None:
    """Write the stand-ins of a model into a folder, which appears complete."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    temporary.mkdir()
    try:
        (temporary / ADDRESS).write_text(address, encoding="utf-8")
        with ThreadPoolExecutor(16) as pool:
            writes = [
                pool.submit(_write_file, temporary / name / file, pin, store) for file, pin in pins.items()
            ]
        for write in writes:
            write.result()
        late = {file: pin for file, pin in pins.items() if _is_late(file, pin)}
        for part in {file.rpartition("/")[0] for file in late}:
            own = {f.rpartition("/")[2]: p.entry() for f, p in late.items() if f.rpartition("/")[0] == part}
            (temporary / name / part / LEFT_OUT).write_text(json.dumps(own))
        temporary.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            raise CheckpointError(
                f"{address}: its headers cannot be kept in {folder.parent}: {error.strerror}. Make room, "
                "or name another cache folder in MECHA_EXP_CACHE."
            ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_file(path: Path, pin: Pin, store: Store) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(SUFFIX) or not _is_small(path.name):
        StandIn(pin, _head(store, pin)).write(path)
    elif not _is_late(path.name, pin):
        path.write_bytes(_content(store, pin))


def _head(store: Store, pin: Pin) -> bytes:
    """The first bytes of a file, with all of its header."""
    head = _range(store, pin, 0, min(FIRST_BYTES, pin.size))
    length = 8 + int.from_bytes(head[:8], "little")
    if not begins_as_safetensors(head) or not len(head) < length <= min(pin.size, MAX_HEADER_BYTES + 8):
        return head  # which is all, or no header: opening it says what is wrong
    return head + _range(store, pin, len(head), length - len(head))


def _content(store: Store, pin: Pin) -> bytes:
    content = _range(store, pin, 0, pin.size)
    if pin.sha256 and hashlib.sha256(content).hexdigest() != pin.sha256:
        raise CheckpointError(
            f"{pin.address} does not have the content that the store says: its hash differs."
        )
    return content


def _range(store: Store, pin: Pin, start: int, count: int) -> bytes:
    content = bytearray(count)
    read_all(store, pin, start, memoryview(content))
    return bytes(content)


def _is_late(name: str, pin: Pin) -> bool:
    is_index = name.endswith(INDEX)
    return _is_small(name) and pin.size > FETCHED_AT_ONCE and not is_index


def _is_small(name: str) -> bool:
    """Whether a file is one of those beside weights: of settings and tokens, a card, a licence."""
    return name.endswith(SMALL_SUFFIXES) or name.rpartition("/")[2].startswith(_SMALL_NAMES)


def _readable(pins: Mapping[str, Pin], address: str) -> dict[str, Pin]:
    """The files of a model that are of use: safetensors, and small files beside them."""
    outside = [name for name in pins if ".." in PurePosixPath(name).parts or name[:1] == "/" or "\\" in name]
    if outside:
        raise CheckpointError(f"{address} names files outside its own folder: {some(outside)}.")
    if list(pins) == [""]:
        _check_format(pins[""].address.partition("@")[0], address)
        return dict(pins)
    readable = {
        name: pin
        for name, pin in pins.items()
        if not any(part.startswith(".") for part in name.split("/"))
        and (name.endswith(SUFFIX) or (_is_small(name) and pin.size <= SMALL))
    }
    if not any(name.endswith(SUFFIX) for name in readable):
        for name in sorted(pins):
            _check_format(name, address)
        raise CheckpointError(f"{address} has no safetensors files.")
    return readable


def _check_format(name: str, address: str) -> None:
    """Refuse a file of another format than safetensors."""
    if kind := NOT_IN_PARTS.get(PurePosixPath(name).suffix):
        raise CheckpointError(
            f"{address} is stored as {kind}, which is not read in parts. Download it, and name the copy."
        )

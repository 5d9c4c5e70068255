"""Files of this machine that stand for remote ones, so that code with a path needs to know nothing else.

A stand-in begins with a line that says what it is, then has one line of JSON, the pin, and then the first
bytes of the remote file: a header is read once. It is followed only in the user's own cache folder. A model
that was downloaded could otherwise lead to any address.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.checkpoint.remote.pin import Pin
from mecha_exp.documents import parse_json, typed
from mecha_exp.system.cache import private_folder

FOLDER = "remote"
_MAGIC = b"mecha_exp: a file that lies elsewhere\n"
ADDRESS = ".address"
"""The file beside a stand-in that has the address which the user named."""
LEFT_OUT = ".left-out.json"
"""The pins of small files that were too large to be fetched before they are needed."""


@dataclass(frozen=True)
class StandIn:
    """The content of a stand-in: the pin, and the first bytes of the file."""

    pin: Pin
    head: bytes

    def write(self, path: Path) -> None:
        """Write the stand-in to a file."""
        text = json.dumps(self.pin.entry())
        path.write_bytes(_MAGIC + text.encode() + b"\n" + self.head)


def stand_ins() -> Path | None:
    """The folder where stand-ins lie; None where the cache is off."""
    return private_folder(FOLDER)


def is_stand_in(path: Path) -> bool:
    """Whether a file stands for a remote one."""
    if FOLDER not in path.parts:  # which saves a look at the disk
        return False
    folder = stand_ins()
    if folder is None or folder not in path.parents or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def place_of(path: Path) -> str:
    """Where a model lies: its path, or its address."""
    return address_of(path) or str(path)


def read_stand_in(path: Path) -> StandIn:
    """Read a stand-in."""
    text, _, head = path.read_bytes().removeprefix(_MAGIC).partition(b"\n")
    return StandIn(typed(parse_json(text), Pin), head)


def address_of(path: Path) -> str | None:
    """The address of what stands at a path of the stand-ins; None for any other file or folder."""
    folder = stand_ins() if FOLDER in path.parts else None
    if folder is None or folder not in path.parents:
        return None
    note = folder / path.relative_to(folder).parts[0] / ADDRESS
    try:
        return note.read_text(encoding="utf-8")
    except OSError:
        return None

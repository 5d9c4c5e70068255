"""The formats of checkpoint files. Everything else that needs a suffix or opens a file asks this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.checkpoint.gguf.header import GGUF_SUFFIX, begins_as_gguf
from mecha_exp.checkpoint.gguf.model import GgufModel
from mecha_exp.checkpoint.model import Checkpoint, StateDictSource
from mecha_exp.checkpoint.remote import RemoteFile, is_stand_in
from mecha_exp.checkpoint.safetensors.header import SUFFIX, begins_as_safetensors, open_regular
from mecha_exp.checkpoint.torch_pickle import PickledModel, begins_as_pickle

_SNIFFED_BYTES = 16


@dataclass(frozen=True)
class Format:
    """One format of checkpoint files.

    Attributes:
        suffixes: the suffixes of weights in a model's folder, the usual one first.
        sniff: whether the first bytes of a file are those of the format.
        open: opens a file.
        other_suffixes: suffixes that only single files have.
    """

    suffixes: tuple[str, ...]
    sniff: Callable[[bytes], bool]
    open: Callable[[Path], StateDictSource]
    other_suffixes: tuple[str, ...] = ()

    def has_suffix(self, path: Path) -> bool:
        """Whether a path ends like a file of this format."""
        return path.suffix in self.suffixes + self.other_suffixes


GGUF = Format((), begins_as_gguf, GgufModel, (GGUF_SUFFIX,))
SAFETENSORS = Format((SUFFIX,), begins_as_safetensors, Checkpoint, (".sft",))
PICKLE = Format((".bin", ".ckpt", ".pt", ".pth"), begins_as_pickle, PickledModel)

FORMATS = (GGUF, SAFETENSORS, PICKLE)
"""All formats, the preferred ones first; GGUF has no folders, and the surest first bytes."""

FOLDER_SUFFIXES = tuple(suffix for known in FORMATS for suffix in known.suffixes)
"""The suffixes of weights in a model's folder, the preferred ones first."""

SUFFIXES = FOLDER_SUFFIXES + tuple(suffix for known in FORMATS for suffix in known.other_suffixes)
"""The suffixes of all checkpoint files."""


def open_file(path: Path) -> StateDictSource:
    """Open a checkpoint file by its first bytes. A file of no known format is refused as safetensors.

    A stand-in is the remote file that it stands for, in the one format that can be read in ranges.
    """
    if is_stand_in(path):
        return Checkpoint(path, RemoteFile(path))
    with open_regular(path) as file:
        start = bytearray(min(_SNIFFED_BYTES, file.stat().st_size))
        file.read_into(0, memoryview(start))
    known = next((known for known in FORMATS if known.sniff(bytes(start))), SAFETENSORS)
    return known.open(path)

"""The names of the hidden files beside an output while it is written."""

import os
import re
import stat
from pathlib import Path

PARTIAL, JOURNAL, LOCK = "partial", "journal", "lock"
NEW = "-new"
"""The suffix of a journal that is about to replace another."""

_NAME = re.compile(rf"\.(?P<target>.+)\.mecha-({PARTIAL}|{JOURNAL}({NEW})?|{LOCK})", re.DOTALL)


def sibling(target: Path, kind: str) -> Path:
    """The hidden file of a kind that belongs to an output.

    >>> sibling(Path("out/model.safetensors"), PARTIAL)
    Path('out/.model.safetensors.mecha-partial')
    """
    return target.with_name(f".{target.name}.mecha-{kind}")


def target_of(path: Path) -> Path | None:
    """The output that a hidden file belongs to; None for any other file."""
    match = _NAME.fullmatch(path.name)
    return path.with_name(match["target"]) if match else None


def disk_bytes(path: Path) -> int:
    """The bytes that a file, or a folder with all that is in it, takes on its disk; 0 if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    size: int = getattr(status, "st_blocks", -(-status.st_size // 512)) * 512
    if not stat.S_ISDIR(status.st_mode):
        return size
    return size + sum(disk_bytes(Path(entry)) for entry in os.scandir(path))

"""The hidden files that lie beside an output while it is being written, and how they are called."""

import re
from pathlib import Path

PARTIAL, JOURNAL, LOCK = "partial", "journal", "lock"
NEW = "-new"
"""What is added to the name of a journal that is about to take the place of another."""

_NAME = re.compile(rf"\.(?P<target>.+)\.mecha-({PARTIAL}|{JOURNAL}({NEW})?|{LOCK})", re.DOTALL)


def sibling(target: Path, kind: str) -> Path:
    """The file of that kind that belongs to an output.

    >>> beside(Path("out/model.safetensors"), PARTIAL)
    Path('out/.model.safetensors.mecha-partial')
    """
    return target.with_name(f".{target.name}.mecha-{kind}")


def target_of(path: Path) -> Path | None:
    """The output that a hidden file belongs to; None for any other file."""
    match = _NAME.fullmatch(path.name)
    return path.with_name(match["target"]) if match else None


def disk_bytes(path: Path) -> int:
    """The room that a file takes on its disk; 0 where there is none."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return getattr(status, "st_blocks", -(-status.st_size // 512)) * 512

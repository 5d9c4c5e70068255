"""Atomic writes of small files: a file appears complete or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` at the end. An error deletes it.

    Args:
        path: the file that appears.
        temporary: the name until then, in the same folder; by default one that no other thread
            uses. Numbers of processes would not do: containers have equal ones.
    """
    if temporary is None:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text with a newline at its end atomically. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")

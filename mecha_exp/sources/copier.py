"""Copies a source to a destination in pieces, so that memory does not grow with the model."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from mecha_exp.checkpoint import Destination
from mecha_exp.checkpoint.positional import byte_view
from mecha_exp.errors import CheckpointError
from mecha_exp.sources.source import Source

COPY_BYTES = 8 << 20
"""The bytes that a thread copies at once."""


class Copied(NamedTuple):
    """The result of a copy.

    Attributes:
        path: the file or folder that was written.
        resumed: the number of keys that an interrupted run had written already.
    """

    path: Path
    resumed: int


def write_source(
    source: Source,
    destination: Destination,
    metadata: Mapping[str, str],
    advance: Callable[[str, int], None] = lambda key, nbytes: None,
    *,
    signature: str | None = None,
    workers: int = 2,
) -> Copied:
    """Copy a source to a destination.

    Args:
        advance: called with a key and a number of bytes for each piece that is written.
        signature: a hash of all that decides the bytes. With it, a run that was killed or interrupted is
            resumed by the next one with the same signature.
        workers: the number of threads.

    Raises:
        CheckpointError: the destination is the source, or cannot be written. Nothing is left behind.
    """
    if destination.path.resolve() in {path.resolve() for path in (source.path, *source.files) if path}:
        raise CheckpointError(f"{destination.path} is the model being read. Choose another output.")
    destination.check()
    buffers, counting = threading.local(), threading.Lock()
    pieces = list(_pieces(source))
    source.expect(source.keys())
    remaining = Counter(key for key, _, _ in pieces)
    writer = destination.open(metadata, durable=True, signature=signature)

    def copy(key: str, start: int, size: int) -> None:
        if key not in writer.finished:
            if not hasattr(buffers, "room"):
                buffers.room = torch.empty(COPY_BYTES, dtype=torch.uint8)
            view = byte_view(buffers.room)[:size]
            source.read_bytes_into(key, start, view)
            writer.write_bytes(key, start, view)
            with counting:
                remaining[key] -= 1
                is_last = not remaining[key]
            if is_last:
                writer.finish(key, {})
        advance(key, size)

    pool = ThreadPoolExecutor(workers)
    try:
        for copied in [pool.submit(copy, *piece) for piece in pieces]:
            copied.result()
        source.check_unchanged()
        return Copied(writer.commit(), len(writer.finished))
    except BaseException as error:
        pool.shutdown(cancel_futures=True)
        if isinstance(error, Exception):
            writer.abort()
        else:
            writer.suspend()
        raise
    finally:
        pool.shutdown()


def _pieces(source: Source) -> Iterator[tuple[str, int, int]]:
    """Yield (key, start, bytes) of all pieces of a source, in the order in which they are best read."""
    for key in source.keys():
        nbytes = source.info(key).nbytes
        for start in range(0, nbytes, COPY_BYTES):
            yield key, start, min(COPY_BYTES, nbytes - start)

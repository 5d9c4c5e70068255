"""A remote file as a readable file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.checkpoint.remote.content_cache import keeper
from mecha_exp.checkpoint.remote.lookup import forget_lookups
from mecha_exp.checkpoint.remote.pieces import Pieces
from mecha_exp.checkpoint.remote.retries import again, read_all
from mecha_exp.checkpoint.remote.stand_in import read_stand_in
from mecha_exp.checkpoint.remote.stores import store_at
from mecha_exp.errors import CheckpointError


class RemoteFile:
    """The remote file that a stand-in stands for. Its first bytes are read from the stand-in.

    Attributes:
        name: its address.
        content: the SHA-256 of its bytes where the store gives it, else a name of its version; see `Pin`.
    """

    def __init__(self, path: Path) -> None:
        stand_in = read_stand_in(path)
        self._pin, self._head = stand_in.pin, stand_in.head
        self.name, self.size, self.content = self._pin.address, self._pin.size, self._pin.content
        self.identity: tuple[str | int, ...] = (self.content, self.size)
        self._keeper = keeper()
        self._pieces = Pieces(self._fetch)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes that start at `offset`.

        Raises:
            CheckpointError: the file changed, is gone, or cannot be read.
        """
        if offset + len(view) > self.size:
            raise CheckpointError(
                f"{self.name} ends at byte {self.size:,}, before byte {offset + len(view):,}."
            )
        known = self._head[offset : offset + len(view)]
        view[: len(known)] = known
        if len(known) < len(view):
            self._pieces.read_into(offset + len(known), view[len(known) :])

    def region(self, offset: int) -> FileRegion | None:
        """None: machine code cannot read it."""
        return None

    def expect(self, extents: Iterable[tuple[int, int]]) -> None:
        """Fetch extents (first byte, bytes) ahead once the first of them is read."""
        first = len(self._head)
        self._pieces.expect(
            (max(start, first), start + size - max(start, first))
            for start, size in extents
            if start + size > first
        )

    def is_unchanged(self) -> bool:
        """Whether the store still has the version that was looked up."""
        now = again(lambda: store_at(self.name).version(self._pin), self.name)
        if now != self._pin.version:
            forget_lookups()
        return now == self._pin.version

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._pieces.close()

    def _fetch(self, start: int, view: memoryview) -> None:
        keeper = self._keeper
        if keeper is None:
            self._download(start, view)
        elif not keeper.read_into(self._pin, start, view):
            with keeper.fetching(self._pin, start, start + len(view)):
                if not keeper.read_into(self._pin, start, view):
                    self._download(start, view)
                    keeper.write(self._pin, start, view)

    def _download(self, start: int, view: memoryview) -> None:
        try:
            read_all(store_at(self.name), self._pin, start, view)
        except CheckpointError:
            forget_lookups()
            raise

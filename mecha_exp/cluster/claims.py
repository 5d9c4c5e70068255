"""Who works at which item of a work, and which items are done: files in a folder that all workers see."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
from pathlib import Path

from mecha_exp.errors import ClusterError

_DONE = ".done"


class Claims:
    """Claims of numbered items in a folder; each item is taken by one holder, also on a network folder.

    folder/
        NAME.holder    a holder
        7              item 7 is taken: a hard link to its holder, which only one of several can make
        7.done         item 7 is done

    Args:
        folder: where the claims lie.
        holder: the name under which items are taken; a new name for each task.

    Raises:
        ClusterError: this machine does not see the folder.
    """

    def __init__(self, folder: Path, holder: str = "") -> None:
        self.folder, self._holder = folder, folder / f"{holder}.holder"
        if not folder.is_dir():
            raise ClusterError(
                f"the worker on {platform.node()} does not see {folder}. Choose a hydra.sweep.dir=... in a "
                "folder that all machines of the cluster share."
            )
        if holder:
            self._holder.write_text(holder, encoding="utf-8")

    @classmethod
    def begin(cls, parent: Path) -> Claims:
        """Claims in a new folder; those of a process that was killed are deleted, and end its workers.

        Raises:
            ClusterError: the file system has no hard links.
        """
        for old in parent.glob("claims-*"):
            shutil.rmtree(old, ignore_errors=True)
        folder = parent / f"claims-{secrets.token_hex(8)}"
        folder.mkdir(parents=True)
        _check_links(folder)
        return cls(folder)

    def take(self, item: int) -> bool:
        """Take an item; returns whether it is free and the claims are still there."""
        claim = self.folder / str(item)
        try:
            os.link(self._holder, claim)
        except (FileExistsError, FileNotFoundError):
            return False
        if (self.folder / f"{item}{_DONE}").exists():  # which may have come just before the link
            claim.unlink(missing_ok=True)
            return False
        return True

    def finish(self, item: int) -> None:
        """Note that an item that was taken here is done, also if its claim was released before."""
        done = self.folder / f"{item}{_DONE}"
        try:
            (self.folder / str(item)).replace(done)
        except FileNotFoundError:  # this holder was taken for lost, and another one may be done already
            done.touch()

    def states(self) -> tuple[set[int], set[int]]:
        """The items that are taken and not done, and those that are done."""
        names = [path.name for path in self.folder.iterdir()]
        done = {int(name.removesuffix(_DONE)) for name in names if name.endswith(_DONE)}
        return {int(name) for name in names if name.isdecimal()} - done, done

    def release(self, holder: str) -> set[int]:
        """Free the items that a lost holder has taken and not done; returns them."""
        taken, _ = self.states()
        released = {item for item in taken if self._taken_by(item) == holder}
        for item in released:
            (self.folder / str(item)).unlink(missing_ok=True)
        return released

    def _taken_by(self, item: int) -> str | None:
        try:
            return (self.folder / str(item)).read_text(encoding="utf-8")
        except FileNotFoundError:  # done meanwhile
            return None


def _check_links(folder: Path) -> None:
    probe = folder / "probe"
    probe.touch()
    try:
        os.link(probe, folder / "link")
    except OSError as error:
        raise ClusterError(
            f"{folder.parent} lies on a file system without hard links ({error.strerror}), by which workers "
            "claim points. Choose a hydra.sweep.dir=... on another one."
        ) from None
    for path in (probe, folder / "link"):
        path.unlink()

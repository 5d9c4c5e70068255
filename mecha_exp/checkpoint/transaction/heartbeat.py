"""Signs of life of writers on other machines, where nothing else tells whether they are gone.

A writer touches its lock files again and again. One of another machine that has not been touched for a long
time belongs to a writer that is gone, or stopped. A process that takes over may only do what the writer
itself would do, should it come back: `belongs_to` says whether both write the same bytes to the same places.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from mecha_exp.checkpoint.transaction.journal import belongs_to
from mecha_exp.checkpoint.transaction.lock import free_lock, is_foreign
from mecha_exp.checkpoint.transaction.paths import LOCK, sibling

BEAT_SECONDS = 20.0
SILENT_SECONDS = 300.0
"""After so long without a sign a writer counts as gone: network folders may show times a minute late."""


@contextlib.contextmanager
def heartbeat(targets: Sequence[Path]) -> Iterator[None]:
    """Touch the locks of outputs, those that this machine holds by then, until the block ends."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            for target in targets:
                with contextlib.suppress(OSError):
                    if not is_foreign(target):
                        os.utime(sibling(target, LOCK))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def free_silent_locks(targets: Sequence[Path], signature: str) -> None:
    """Free the locks of writers on other machines that have given no sign of life for `SILENT_SECONDS`.

    Only those whose journal says that they make what the caller makes: both write the same bytes.

    Args:
        targets: in one folder.
        signature: of the journals; see `Journal`.
    """
    foreign = [target for target in targets if is_foreign(target)]
    if not foreign:
        return
    with tempfile.NamedTemporaryFile(dir=foreign[0].parent, prefix=".now-") as probe:
        now = Path(probe.name).stat().st_mtime  # by the clock that the locks are touched by
    for target in foreign:
        with contextlib.suppress(FileNotFoundError):
            silent = now - sibling(target, LOCK).stat().st_mtime
            if silent > SILENT_SECONDS and belongs_to(target, signature):
                free_lock(target)

"""How many files this process may hold open. A merge of hundreds of models or shards holds all of them."""

from __future__ import annotations

import errno

from mecha_exp.errors import MergeError

try:
    import resource
except ImportError:  # Windows, whose limit is far away
    resource = None  # type: ignore[assignment]

SPARE = 64
"""Files that are kept for other purposes: libraries, logs, what is opened for a moment."""

_SWEEP_LIMIT, _WINDOWS_LIMIT = 4096, 512


def openable_files() -> int:
    """How many files this process may open for the outputs of a sweep. Raises the soft limit first."""
    if resource is None:
        return _WINDOWS_LIMIT - SPARE
    _raise_soft_limit(_SWEEP_LIMIT)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_SWEEP_LIMIT if soft == resource.RLIM_INFINITY else soft) - SPARE


def raise_limit(descriptor: int) -> None:
    """Raise the soft limit, as far as the hard one allows, where a new file has come close to it.

    The system gives the lowest free number to a file, so that its number says how many are open.
    """
    if resource is not None and descriptor + SPARE >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 0:
        _raise_soft_limit(2 * (descriptor + SPARE))


def explain_limit(error: OSError) -> None:
    """Raise MergeError with the cure where an error says that too many files are open."""
    if error.errno != errno.EMFILE:
        return
    limit = "" if resource is None else f" {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
    raise MergeError(
        f"too many files are open: the system allows this process{limit}, and every input and output of a "
        "merge is one, every shard too. Raise the limit (`ulimit -n 4096`, or nofile in "
        "/etc/security/limits.conf), or merge fewer models at once."
    ) from None


def _raise_soft_limit(minimum: int) -> None:
    """Raise the soft limit to `minimum`, or to the hard limit where that is lower. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = minimum if hard == resource.RLIM_INFINITY else min(minimum, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):  # macOS promises more than it gives
        return

"""How many files this process may hold open: a merge of hundreds of models or shards holds all of them."""

from __future__ import annotations

import errno

from mecha_exp.errors import MergeError

try:
    import resource
except ImportError:  # Windows, whose limit is far away
    resource = None  # type: ignore[assignment]

SPARE = 64
"""Files that are opened besides: outputs and their journals, libraries."""


def raise_limit(descriptor: int) -> None:
    """Raise the soft limit, as far as the hard one allows, where a new file has come close to it.

    The system gives the lowest free number to a file, so that its number says how many are open.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (hard, resource.RLIM_INFINITY) or descriptor + SPARE < soft:
        return
    wanted = 2 * (descriptor + SPARE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_least(wanted, hard), hard))
    except (OSError, ValueError):  # macOS promises more than it gives
        return


def explain_limit(error: OSError) -> None:
    """Raise MergeError with what to do where an error says that too many files are open."""
    if error.errno != errno.EMFILE:
        return
    limit = "" if resource is None else f" {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
    raise MergeError(
        f"too many files are open: the system allows this process{limit}, and every input and output of a "
        "merge is one, every shard too. Raise the limit (`ulimit -n 4096`, or nofile in "
        "/etc/security/limits.conf), or merge fewer models at once."
    ) from None


def _least(wanted: int, hard: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)

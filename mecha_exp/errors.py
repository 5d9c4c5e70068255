"""The tree of errors that mecha_exp raises on purpose.

    MechaError
    ├── ConfigError        the configuration: an unknown name, a wrong type, a value out of range
    ├── RecipeError        the graph: merge spaces, arguments, the .mecha text
    ├── CheckpointError    a file: missing, corrupt, a key or a shape that does not fit
    ├── MergeError         the merge itself: not finite, out of memory, a method that failed
    ├── StoreError         the store of results: a full disk, a newer format
    ├── EvaluationError    an evaluator that raised, took too long, or did not return numbers
    └── TrackingError      a run could not be logged: a server that does not answer

A message says what is wrong, where, and how to mend it. Several problems are reported at once: collect them
in `Problems`, and raise when everything has been checked.
"""

import difflib
from collections.abc import Iterable


class MechaError(Exception):
    """The root of every error that mecha_exp raises on purpose."""


class ConfigError(MechaError):
    """An invalid configuration: an unknown name, a wrong type, a value out of range."""


class RecipeError(MechaError):
    """An invalid recipe graph, or an invalid `.mecha` text."""


class CheckpointError(MechaError):
    """A checkpoint that cannot be read, written, or merged with the others."""


class MergeError(MechaError):
    """A merge that failed after it had started."""


class StoreError(MechaError):
    """A store of results that cannot be read or written."""


class EvaluationError(MechaError):
    """A merged model that could not be measured; `evaluation` is the key of the evaluation that failed."""

    def __init__(self, message: str, evaluation: str = "") -> None:
        super().__init__(message)
        self.evaluation = evaluation


class TrackingError(MechaError):
    """A finished run that could not be logged."""


class Problems:
    """Collects problems, so that a user sees and mends all of them at once.

    >>> problems = Problems()
    >>> problems.add("alpha: expected a number, got 'abc'")
    >>> problems.raise_as(ConfigError)
    Traceback (most recent call last):
    mecha_exp.errors.ConfigError: alpha: expected a number, got 'abc'
    """

    def __init__(self) -> None:
        self._messages: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, problem: str | Exception) -> None:
        """Add a problem; the same message counts once."""
        message = str(problem)
        if message not in self._messages:
            self._messages.append(message)

    def add_all(self, problems: Iterable[str]) -> None:
        """Add several problems."""
        for problem in problems:
            self.add(problem)

    def raise_as(self, kind: type[MechaError]) -> None:
        """Raise one `kind` with all messages, if there are any."""
        if len(self._messages) == 1:
            raise kind(self._messages[0])
        if self._messages:
            listed = "".join(f"\n  {i}. {m}" for i, m in enumerate(self._messages, 1))
            raise kind(f"{len(self._messages)} problems:{listed}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to append to a message: the `known` names nearest to `name`, or else the first of all.

    >>> did_you_mean("alhpa", ["alpha", "k"])
    " Did you mean 'alpha'?"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(repr(n) for n in near)}?"
    if not names:
        return ""
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f" Known: {shown}."


def some(names: Iterable[str], limit: int = 10) -> str:
    """The first `limit` names and the count of the rest, for messages about many keys."""
    listed = list(names)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + rest

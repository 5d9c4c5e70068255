"""The tree of errors that mecha_exp raises on purpose.

    MechaError
    ├── ConfigError        the configuration: an unknown name, a wrong type, a value out of range
    ├── RecipeError        the graph: merge spaces, arguments, the .mecha text
    │   └── ArgumentError  the arguments of a merge method; a TypeError, too
    ├── CheckpointError    a file: missing, corrupt, a key or a shape that does not fit
    ├── MergeError         the merge itself: not finite, out of memory, a method that failed
    ├── StoreError         the store of results: a full disk, a newer format
    ├── EvaluationError    an evaluator that raised, took too long, or did not return numbers
    ├── TrackingError      a run could not be logged: a server that does not answer
    └── ClusterError       workers of Ray or Slurm: none to be had, lost, or without the folder

A message says what is wrong, where, and how to mend it. Several problems are reported at once: collect them
in `Problems`, and raise when everything has been checked.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

MAX_MESSAGE = 2000
"""Characters of the longest message."""
MAX_VALUE = 120
"""Characters of a value in a message."""
MAX_LISTED = 10
"""Problems that one message lists."""


class MechaError(Exception):
    """The root of every error that mecha_exp raises on purpose.

    A message of more than 2,000 characters is shortened in its middle.
    """

    _problems: tuple[str, ...] = ()
    """The problems that the message lists, where it lists several."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(shortened(a, MAX_MESSAGE) if isinstance(a, str) else a for a in arguments))


class ConfigError(MechaError):
    """An invalid configuration: an unknown name, a wrong type, a value out of range."""


class RecipeError(MechaError):
    """An invalid recipe graph, or an invalid `.mecha` text."""


class ArgumentError(RecipeError, TypeError):
    """Invalid arguments of a merge method."""


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


class ClusterError(MechaError):
    """Workers of a cluster that cannot be had, that were lost, or that do not see what they need."""


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

    @contextmanager
    def collected(self, kind: type[MechaError], prefix: str = "") -> Iterator[None]:
        """Add an error of this kind to the others, in place of raising it; one that lists several adds each.

        >>> problems = Problems()
        >>> with problems.collected(ConfigError, "alpha: "):
        ...     raise ConfigError("expected a number")
        >>> bool(problems)
        True
        """
        try:
            yield
        except kind as error:
            self.add_all(f"{prefix}{problem}" for problem in error._problems or [str(error)])

    def raise_as(self, kind: type[MechaError]) -> None:
        """Raise one `kind` with all messages, if there are any."""
        if len(self._messages) == 1:
            raise kind(self._messages[0])
        if self._messages:
            listed = "".join(f"\n  {i}. {m}" for i, m in enumerate(self._messages[:MAX_LISTED], 1))
            rest = len(self._messages) - MAX_LISTED
            more = f"\n  and {rest} more" if rest > 0 else ""
            error = kind(f"{len(self._messages)} problems:{listed}{more}")
            error._problems = tuple(self._messages)
            raise error


@contextmanager
def prefixed(prefix: str, kind: type[MechaError] = ConfigError) -> Iterator[None]:
    """Put a prefix, such as the name of a setting, before the message of an error of this kind.

    >>> with prefixed("output.dtype: "):
    ...     raise ConfigError("unknown dtype 'x'")
    Traceback (most recent call last):
    mecha_exp.errors.ConfigError: output.dtype: unknown dtype 'x'
    """
    try:
        yield
    except kind as error:
        with_prefix = type(error)(f"{prefix}{error}")
        with_prefix._problems = tuple(f"{prefix}{problem}" for problem in error._problems)
        raise with_prefix from None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A hint to append to a message: the `known` names nearest to `name`, or else the first of all.

    >>> did_you_mean("alhpa", ["alpha", "k"])
    " Did you mean 'alpha'?"
    """
    names = sorted(known)
    near = nearest(str(name), names)
    if near:
        return f" Did you mean {' or '.join(repr(n) for n in near)}?"
    if not names:
        return ""
    shown = ", ".join(shortened(n, MAX_VALUE) for n in names[:12]) + (", ..." if len(names) > 12 else "")
    return f" Known: {shown}."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The names nearest to `name`, three at most, the nearest first; the case of letters does not count.

    >>> nearest("grad_v", ["GRAD_V", "WRAP12"])
    ['GRAD_V']
    """
    by_case: dict[str, list[str]] = {}
    for other in sorted(known):
        by_case.setdefault(other.casefold(), []).append(other)
    near = difflib.get_close_matches(name[:MAX_VALUE].casefold(), by_case, n=3, cutoff=cutoff)
    same = [name] if name in by_case.get(name.casefold(), ()) else []
    return list(dict.fromkeys([*same, *(other for folded in near for other in by_case[folded])]))[:3]


def brief(value: object, limit: int = MAX_VALUE) -> str:
    """The representation of a value in one line, shortened in its middle.

    >>> brief([0] * 100, 20)
    '[0, 0, 0, 0, … 0, 0]'
    """
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):  # tensors and arrays, whose numbers say nothing here
        return f"{type(value).__name__} of shape {list(shape)} and {value.dtype}"
    return shortened(" ".join(repr(value).split()), limit)


def shortened(text: str, limit: int) -> str:
    """A text with its middle left out where it is longer than `limit` characters.

    >>> shortened("abcdefghij", 7)
    'abcd…ij'
    """
    if len(text) <= limit:
        return text
    if limit < MAX_MESSAGE:
        tail = limit // 3
        return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"
    gap = f" … ({len(text):,} characters, the middle is left out) … "
    tail = (limit - len(gap)) // 4
    return text[: limit - len(gap) - tail] + gap + text[len(text) - tail :]


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its type where it says nothing.

    >>> first_line(OSError("no such file\\nand more about it"))
    'no such file'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def counted(count: int, one: str, many: str = "") -> str:
    """A count with its noun, and its verb where it has one, for one and for many.

    >>> counted(1, "key has", "keys have"), counted(2000, "key")
    ('1 key has', '2,000 keys')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def some(names: Iterable[str], limit: int = 10) -> str:
    """The first `limit` names and the count of the rest, for messages about many keys."""
    listed = list(names)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + rest

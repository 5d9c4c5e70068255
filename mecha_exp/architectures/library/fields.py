"""Reading the fields of YAML one by one: every mistake is noted with its place, and reading goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from mecha_exp.documents import parse_yaml
from mecha_exp.errors import ConfigError, Problems, did_you_mean, prefixed

Parsed = TypeVar("Parsed")
Default = TypeVar("Default")
Readers = Mapping[str, Callable[[Any, str], Any]]
"""By the name of a field, (what YAML holds, its place) -> the field's value."""


def load_yaml(text: str, name: str) -> Any:
    """Parse YAML; ConfigError, which names it, where it is none that `documents` reads."""
    with prefixed(f"{name}: "):
        return parse_yaml(text)


class FieldReader:
    """Reads values from what YAML holds. A wrong value is noted and replaced by an empty one.

    Attributes:
        problems: every mistake so far, with its place.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.problems = Problems()

    def fields(
        self, value: Any, where: str, readers: Readers, required: Iterable[str] = ()
    ) -> dict[str, Any]:
        """The fields of a mapping, in the order of their readers; without those whose readers return None."""
        entries = self.mapping(value, where)
        for name in entries:
            if name not in readers:
                self.wrong(_joined(where, name), "unknown field", did_you_mean(name, readers))
        for name in required:
            if isinstance(value, Mapping) and name not in value:
                self.wrong(_joined(where, name), "it is missing")
        known = ((name, read) for name, read in readers.items() if name in entries)
        read_fields = ((name, read(entries[name], _joined(where, name))) for name, read in known)
        return {name: field for name, field in read_fields if field is not None}

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        """A mapping whose names are strings."""
        nothing: Mapping[Any, Any] = {}
        entries = self._expected(isinstance(value, Mapping), "a mapping", value, where, nothing)
        for name in entries:
            if not isinstance(name, str):
                self.wrong(where, f"the name {name!r} is not a text: write it in quotes")
        return {name: entry for name, entry in entries.items() if isinstance(name, str)}

    def patterned(self, value: Any, where: str) -> Iterator[tuple[str, Any, str]]:
        """The entries of a mapping from brace patterns: the pattern, the value, and its place."""
        for name, entry in self.mapping(value, where).items():
            yield name, entry, f"{where}[{name!r}]"

    def text(self, value: Any, where: str) -> str:
        """Check that a value is a string."""
        return self._expected(isinstance(value, str), "a text", value, where, str(value))

    def texts(self, value: Any, where: str) -> list[str]:
        """Check that a value is a list of strings."""
        ok = isinstance(value, list) and all(isinstance(text, str) for text in value)
        return self._expected(ok, "a list of texts", value, where, [])

    def listed(self, value: Any, where: str, of: str) -> list[Any]:
        """A list of anything; `of` says what, with an example."""
        return self._expected(isinstance(value, list), f"a list of {of}", value, where, [])

    def flag(self, value: Any, where: str) -> bool:
        """Check that a value is a bool."""
        return self._expected(isinstance(value, bool), "true or false", value, where, False)

    def positive(self, value: Any, where: str) -> int | None:
        """An int above zero; None where it is something else."""
        return self._expected(type(value) is int and value > 0, "a positive number", value, where, None)

    def parsed(
        self, parse: Callable[[str], Parsed], text: str, where: str, otherwise: Default
    ) -> Parsed | Default:
        """What `parse` makes of a string; `otherwise` after a ConfigError, which is noted."""
        try:
            return parse(text)
        except ConfigError as error:
            self.wrong(where, str(error))
            return otherwise

    def wrong(self, where: str, what: str, hint: str = "") -> None:
        """Note a mistake."""
        place = f"{where}: " if where else ""
        stop = "" if what.endswith((".", "?")) else "."
        self.problems.add(f"{self._name}: {place}{what}{stop}{hint}")

    def _expected(self, ok: bool, what: str, value: Any, where: str, otherwise: Default) -> Default:
        if not ok:
            self.wrong(where, f"expected {what}, got {value!r}")
        return value if ok else otherwise


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}".lstrip(".")

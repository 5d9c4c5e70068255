"""The BibTeX entries of merge methods, by the sources that their docstrings name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from mecha_exp.errors import RecipeError
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.registry import resolve_method

OWN = "mecha_exp"
"""The key of this project's entry."""
OF_MODES = {"gradient": ("yang2024adamerging",), "greedy_soup": ("wortsman2022soups",)}
"""The entries of sweeps that choose weights, or experts, as a paper does."""
_ENTRY = re.compile(r"^@(\w+)\{(\w+),\n(.*?)^\}\n", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  (\w+) = \{(.*)\},$", re.MULTILINE)
_CALL = re.compile(r'^merge "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """A BibTeX entry.

    Attributes:
        kind: such as `article`.
        key: by which a text cites it.
        fields: by name.
        source: how docstrings name it where it has no number of arXiv.
    """

    kind: str
    key: str
    fields: Mapping[str, str]
    source: str = ""

    @property
    def is_project(self) -> bool:
        """Whether it is code, which is cited where a docstring names no paper."""
        return bool(self.source) and not self.source[-1].isdigit()

    @property
    def text(self) -> str:
        """The entry as BibTeX reads it."""
        lines = [f"  {name} = {{{value}}}," for name, value in self.fields.items()]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"]) + "\n"

    def is_named_in(self, source: str) -> bool:
        """Whether the `Source:` of a docstring names it."""
        number = self.fields.get("eprint")
        return (number is not None and f"arXiv:{number}" in source) or (
            bool(self.source) and self.source in source
        )


@cache
def entries() -> Sequence[Entry]:
    """Every entry of `references.bib`, this project's first."""
    text = resources.files(__package__).joinpath("references.bib").read_text(encoding="utf-8")
    known = []
    for kind, key, body in _ENTRY.findall(text):
        fields = dict(_FIELD.findall(body))
        known.append(Entry(kind, key, fields, fields.pop("source", "")))
    return known


def source_of(method: MergeMethod) -> str:
    """What the docstring of a merge method names as its source; empty where it names none."""
    _, separator, source = (inspect.getdoc(method) or "").rpartition("Source: ")
    return " ".join(source.split()) if separator else ""


def methods_in(recipe: str) -> list[str]:
    """The names of the merge methods that the text of a recipe calls, in their order."""
    return list(dict.fromkeys(_CALL.findall(recipe)))


def cited(methods: Iterable[str], modes: Iterable[str] = ()) -> tuple[list[Entry], list[str]]:
    """The entries of merge methods and of modes of sweeps, after this project's own.

    Args:
        methods: by name.
        modes: of sweeps, such as `gradient`.

    Returns:
        The entries, and the names of the methods that have none: those of plugins, and plain arithmetic.
    """
    keys, without = [OWN, *(key for mode in modes for key in OF_MODES.get(mode, ()))], []
    for name in methods:
        try:
            source = source_of(resolve_method(name))
        except RecipeError:  # of a plugin that is not loaded
            source = ""
        named = [entry for entry in entries() if entry.is_named_in(source)]
        papers = [entry for entry in named if not entry.is_project]
        keys += [entry.key for entry in papers or named]
        without += [] if named else [name]
    return [entry for entry in entries() if entry.key in keys], without

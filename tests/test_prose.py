"""The prose of docstrings, messages and pages, as far as a machine can judge it (see CONTRIBUTING.md)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = sorted(
    path for folder in ("mecha_exp", "methods", "examples") for path in (REPOSITORY / folder).rglob("*.py")
)
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]

OPENING = re.compile(r"(Of|That of|Those|The same|Its|Their|What became|What becomes)\b")
"""How a first line begins that only makes sense with the name above it."""

BARE = re.compile(r"(The|A|An|Its|Their|For|By|As|In|Own)\b")
"""How one or two words begin that are not a sentence."""

PERSONS = re.compile(r"\b([Ww]hoever|[Ss]omebody|[Nn]obody)\b")
"""Persons in the place of code: a caller, a reader, another process."""

IS_NO = re.compile(r"(?<!\b[Tt]here )\b(?:is|are)\s+no\b(?! longer)")
"""`X is no Y`, where English says `X is not a Y`."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the text of every docstring, those of attributes among them."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value.strip()


def faults_of_docstring(text: str) -> Iterator[str]:
    """What is wrong with the first line of a docstring."""
    first = text.partition("\n")[0].strip()
    if OPENING.match(first):
        yield f"begins with a word that refers to what is not there: {first}"
    if len(first.split()) < 3 and BARE.match(first):
        yield f"is not a phrase that explains: {first}"
    if not first.endswith((".", "?", ":")):
        yield f"ends without a period: {first}"


def faults_of_text(text: str) -> Iterator[str]:
    """The places where a text says `X is no Y`."""
    for match in IS_NO.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield f"line {line}: say 'is not a': {' '.join(text[match.start() - 30 : match.end() + 30].split())}"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_docstrings_and_messages_are_plain(path: Path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    faults = [
        f"line {line}: {fault}" for line, text in docstrings(tree) for fault in faults_of_docstring(text)
    ]
    faults += faults_of_text(source)
    faults += [f"say who: {match[0]}" for match in PERSONS.finditer(source)]
    if not ast.get_docstring(tree):
        faults.append("line 1: the module has no docstring")

    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_pages_are_plain(path: Path):
    faults = [*faults_of_text(path.read_text(encoding="utf-8"))]

    if faults:
        pytest.fail("\n".join(faults), pytrace=False)

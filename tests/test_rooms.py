"""Each room keeps its own secrets: which module may use what."""

import ast
from collections.abc import Iterator
from pathlib import Path

import mecha_exp
from mecha_exp.app.words import slips
from mecha_exp.checkpoint.formats import SUFFIXES
from mecha_exp.checkpoint.remote.address import FILE_SUFFIXES
from mecha_exp.cli import VERBS

PACKAGE = Path(mecha_exp.__file__).parent
NOUNS = {
    "binding", "counting", "drawing", "learning", "loading", "meaning", "racing", "scoring", "sorting",
    "staging", "tracking",
}  # fmt: skip
"""Nouns of the field that end as participles do."""


def test_no_module_uses_the_insides_of_hydra_or_omegaconf():
    modules = [module for path in PACKAGE.rglob("*.py") for module in _imported_modules(path)]

    assert not [m for m in modules if f"{m}.".startswith(("hydra._", "omegaconf._", "omegaconf.base"))]
    assert "hydra.core.plugins.Plugins" in modules


def test_a_folder_has_few_enough_files_to_be_seen_at_once():
    folders = [path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    counts = {folder.relative_to(PACKAGE).as_posix(): len([*folder.glob("*.py")]) for folder in folders}
    verbs = counts.pop("cli")

    assert verbs == len(VERBS) + len(["__init__", "arguments", "recipes"])
    assert {name: count for name, count in counts.items() if not 3 <= count <= 14} == {}


def test_a_module_is_called_by_a_noun():
    """A participle says how something came about, and not what it is."""
    names = {path.stem for path in PACKAGE.rglob("*.py")}

    assert {name for name in names - NOUNS if name.endswith(("ing", "ed"))} == set()
    assert names >= NOUNS


def test_every_list_of_suffixes_is_that_of_the_table_of_formats():
    assert {*slips.MODELS} == {*FILE_SUFFIXES} == {*SUFFIXES}


def test_no_module_hides_a_public_name():
    """Importing `mecha_exp.NAME` as a module would replace the public object of that name."""
    modules = {path.stem for path in PACKAGE.iterdir()} - {"extensions"}

    assert modules & set(mecha_exp.__all__) == set()


def _imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

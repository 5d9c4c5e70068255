"""The built-in methods import what a method of a user's own may import, and nothing else."""

import ast
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "methods").glob("*.py"))
OPEN = {"mecha_exp", "mecha_exp.architectures", "mecha_exp.extensions.merge_methods", "mecha_exp.methods"}
LIBRARIES = {"numpy", "scipy", "torch"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_method_imports_the_public_api_alone(path: Path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}

    beyond = {m for m in modules - OPEN if not m.startswith("mecha_exp.methods.")}
    assert {m for m in beyond if m.partition(".")[0] not in LIBRARIES} == set()

"""What the hash of a merge method's code covers: its own package, and nothing of the API below it."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

import mecha_exp
from mecha_exp import methods, random
from mecha_exp.engine.code_hash import code_hashes, files_of_code
from mecha_exp.engine.ir.expansion import expand
from mecha_exp.graph.nodes import MergeNode, walk
from mecha_exp.methods.dare import dare_linear

METHOD = """
from torch import Tensor
from mecha_exp import Parameter, Return, merge_method
{imports}

@merge_method(register=False)
def scaled(a: Parameter(Tensor)) -> Return(Tensor):
    return a * factor()
"""
DARE = dare_linear("base", "a", "b", density=0.5)
FACTOR = "def factor():\n    return 2\n"


def hash_of(
    folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str = "method"
) -> str:
    """The hash of the method `scaled` in a module of these files."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    before = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        method = importlib.import_module(name).scaled
    for module in set(sys.modules) - before:
        del sys.modules[module]
    return code_hashes(method("a"))["scaled"]


def test_the_hash_of_uniform_covers_one_file():
    path = Path(random.__file__)

    assert files_of_code(path) == [path]


def test_a_recipe_with_draws_depends_on_no_other_file_of_the_api():
    package = Path(mecha_exp.__file__).parent
    called = {node.method for node in walk(*expand([DARE])) if isinstance(node, MergeNode)}

    files = {file for method in called for file in files_of_code(Path(inspect.getfile(method.__wrapped__)))}

    assert {file for file in files if file.parent == package} == {Path(random.__file__)}
    assert {file.parent for file in files} == {package, Path(methods.__file__).parent}


@pytest.mark.parametrize(
    ("imports", "helper"),
    [
        ("from helpers import factor", "helpers.py"),
        ("import helpers; factor = helpers.factor", "helpers.py"),
        ("from helpers import factor", "helpers/__init__.py"),
        ("from helpers.numbers_ import factor", "helpers/numbers_.py"),
        ("import helpers.numbers_; factor = helpers.numbers_.factor", "helpers/numbers_.py"),
    ],
)
def test_a_helper_beside_a_plugin_counts(tmp_path, monkeypatch, imports, helper):
    files = {"method.py": METHOD.format(imports=imports), helper: FACTOR}

    first = hash_of(tmp_path / "first", files, monkeypatch)
    same = hash_of(tmp_path / "same", files, monkeypatch)
    edited = hash_of(tmp_path / "edited", {**files, helper: FACTOR.replace("2", "3")}, monkeypatch)
    unused = hash_of(tmp_path / "unused", {**files, "errors.py": "x = 1\n"}, monkeypatch)

    assert first == same == unused != edited


@pytest.mark.parametrize(
    ("module", "imports"),
    [
        ("acme.method", "from .sub import factor"),
        ("acme.method", "from .sub.deep import factor"),
        ("acme.method", "from . import factor"),
        ("acme.method", "from acme.sub import factor"),
        ("acme.method", "from acme.sub.deep import factor"),
        ("acme.inner.method", "from ..sub import factor"),
        ("acme.inner.method", "from acme.sub.deep import factor"),
    ],
)
def test_a_package_with_folders_counts_by_relative_and_absolute_names(tmp_path, monkeypatch, module, imports):
    package = {
        "acme/__init__.py": "from .sub import factor\n",
        "acme/inner/__init__.py": "",
        "acme/sub/__init__.py": "from .deep import factor\n",
        "acme/sub/deep.py": FACTOR,
        f"{module.replace('.', '/')}.py": METHOD.format(imports=imports),
    }
    commented = {**package, "acme/sub/deep.py": f'"""Numbers."""\n# two\n{FACTOR}'}
    edited = {**package, "acme/sub/deep.py": FACTOR.replace("2", "3")}

    first = hash_of(tmp_path / "first", package, monkeypatch, module)

    assert hash_of(tmp_path / "same", commented, monkeypatch, module) == first
    assert hash_of(tmp_path / "edited", edited, monkeypatch, module) != first


def test_a_module_named_like_one_of_the_api_is_not_taken_for_it(tmp_path):
    (tmp_path / "errors.py").write_text("")
    (tmp_path / "method.py").write_text(
        "from mecha_exp.errors import MergeError\nfrom mecha_exp import errors\n"
    )

    assert files_of_code(tmp_path / "method.py") == [tmp_path / "method.py"]

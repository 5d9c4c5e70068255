"""What the hash of code covers: the function and all that it reaches by name, and nothing else."""

import importlib
import json
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mecha_exp as mx
from mecha_exp import methods
from mecha_exp.engine.code_hash import code_hash, code_hashes, of_function, sources, sources_of
from mecha_exp.engine.code_hash.functions import reach
from mecha_exp.errors import ConfigError
from mecha_exp.method_api.registry import all_methods
from mecha_exp.methods.dare import dare_linear

METHOD = """
from torch import Tensor
from mecha_exp import Parameter, Return, merge_method
{imports}

@merge_method(register=False)
def scaled(a: Parameter(Tensor)) -> Return(Tensor):
    return a * {factor}
"""
FACTOR = "def factor():\n    return 2\n"


def load(folder: Path, files: dict[str, str], patch: pytest.MonkeyPatch, name: str = "method") -> ModuleType:
    """Import a module of these files; no other module of its name is met."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    before = set(sys.modules)
    with patch.context() as context:
        context.setattr(sys, "dont_write_bytecode", True)
        context.syspath_prepend(folder)
        importlib.invalidate_caches()
        try:
            module = importlib.import_module(name)
            reach(getattr(module, "scaled", None) or module.score)  # reads the files while they are there
        finally:
            for other in set(sys.modules) - before:
                del sys.modules[other]
    return module


def hash_of(folder: Path, files: dict[str, str], patch: pytest.MonkeyPatch, name: str = "method") -> str:
    """The hash of the method `scaled`, or of the function `score`, in a module of these files."""
    module = load(folder, files, patch, name)
    return of_function(getattr(module, "scaled", None) or module.score)


def method(imports: str = "", factor: str = "factor()") -> str:
    return METHOD.format(imports=textwrap.dedent(imports), factor=factor)


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
    files = {"method.py": method(imports), helper: FACTOR}

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
        f"{module.replace('.', '/')}.py": method(imports),
    }
    commented = {**package, "acme/sub/deep.py": f'"""Numbers."""\n# two\n{FACTOR}'}
    edited = {**package, "acme/sub/deep.py": FACTOR.replace("2", "3")}

    first = hash_of(tmp_path / "first", package, monkeypatch, module)

    assert hash_of(tmp_path / "same", commented, monkeypatch, module) == first
    assert hash_of(tmp_path / "edited", edited, monkeypatch, module) != first


BASE = {
    "method.py": """
        import enum, functools, json, os, re
        from dataclasses import dataclass
        from pathlib import Path
        import numpy as np
        import torch
        from torch import Tensor
        from mecha_exp import Parameter, Return, merge_method
        from helper import helped
        import whole

        STRENGTH = 0.5
        UNUSED = 1
        TABLE = {"a": [1, 2], "b": (3, {4})}
        ARRAY = np.arange(3)
        TENSOR = torch.tensor([1.0, 2.0])
        NAME = re.compile("a+")
        MASK = json.loads(Path(__file__).with_name("mask.json").read_text())
        READ = Path(__file__).parent / "read.txt"
        CALLS = 0
        LOCK = __import__("threading").Lock()
        twice = lambda x: x * 2
        half = functools.partial(max, 0.5)

        class Mode(enum.Enum):
            FAST = 1

        @dataclass
        class Settings:
            scale: float = 1.5

            def value(self):
                return self.scale + 0

        SETTINGS = Settings()

        def doubled(function):
            @functools.wraps(function)
            def inner(*args):
                return function(*args) * 2
            return inner

        @functools.cache
        def cached():
            return 7

        @doubled
        def decorated():
            return 1

        def unused():
            return UNUSED

        class Base:
            rate = 3

            def apply(self, a):
                return a * self.rate

        class Own(Base):
            def __call__(self, a):
                def local():
                    return 11
                return self.apply(a) + local()

        @merge_method(register=False)
        def scaled(a: Parameter(Tensor, help="any"), k: Parameter(float, ge=0) = STRENGTH) -> Return(Tensor):
            \"\"\"Scale.\"\"\"
            from inner_import import late
            global CALLS
            CALLS += 1
            with LOCK:
                first = (STRENGTH, TABLE, ARRAY, TENSOR, NAME, MASK, READ.read_text(), twice, half, Mode.FAST)
            return Own()(a) * helped(a) * whole.used() + cached() + decorated() + SETTINGS.value() + late()
    """,
    "helper.py": """
        def helped(a):  # helps
            return further(a)

        def further(a):
            return a + 1

        def other(a):
            return a
    """,
    "whole.py": "def used():\n    return 1\n\ndef unused():\n    return 2\n",
    "inner_import.py": "def late():\n    return 13\n",
    "mask.json": "[1, 2]",
    "read.txt": "one",
}
BASE = {file: textwrap.dedent(text) for file, text in BASE.items()}

COUNTS = [
    ("method.py", "STRENGTH = 0.5", "STRENGTH = 0.25"),
    ("method.py", "CALLS = 0", "CALLS = 1"),
    ("method.py", '"a": [1, 2]', '"a": [1, 3]'),
    ("method.py", "(3, {4})", "(3, {5})"),
    ("method.py", "np.arange(3)", "np.arange(4)"),
    ("method.py", "[1.0, 2.0]", "[1.0, 2.5]"),
    ("method.py", '"a+"', '"b+"'),
    ("method.py", "x * 2", "x * 3"),
    ("method.py", "max, 0.5", "max, 0.6"),
    ("method.py", "max, 0.5", "min, 0.5"),
    ("method.py", "FAST = 1", "FAST = 2"),
    ("method.py", "scale: float = 1.5", "scale: float = 1.25"),
    ("method.py", "self.scale + 0", "self.scale + 1"),
    ("method.py", "function(*args) * 2", "function(*args) * 3"),
    ("method.py", "return 7", "return 8"),
    ("method.py", "    return 1\n", "    return 9\n"),
    ("method.py", "rate = 3", "rate = 4"),
    ("method.py", "a * self.rate", "a - self.rate"),
    ("method.py", "return 11", "return 12"),
    ("method.py", "ge=0", "ge=1"),
    ("method.py", "threading", "asyncio"),
    ("helper.py", "a + 1", "a + 2"),
    ("whole.py", "return 1", "return 3"),
    ("inner_import.py", "return 13", "return 14"),
    ("mask.json", "[1, 2]", "[1, 3]"),
    ("read.txt", "one", "two"),
]
CHANGES_NOTHING = [
    ("method.py", "UNUSED = 1", "UNUSED = 2"),
    ("method.py", "return UNUSED", "return -UNUSED"),
    ("method.py", '"""Scale."""', '"""Scale otherwise.\n\n    In words."""'),
    ("method.py", 'help="any"', 'help="any number"'),
    ("method.py", "@merge_method(register=False)", '@merge_method(register=False, title="Scaled", base="a")'),
    ("method.py", "return a * self.rate", "return (a  *  self.rate)  # scaled"),
    ("method.py", "import whole", "import whole\n\n# a comment"),
    ("helper.py", "# helps", ""),
    ("helper.py", "def other(a):\n    return a\n", ""),
    ("whole.py", "return 2", "return 5"),
]


@pytest.fixture(scope="module")
def base_hash(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return hash_of(tmp_path_factory.mktemp("base"), BASE, patch)


def edited(file: str, old: str, new: str) -> dict[str, str]:
    assert old in BASE[file]
    return {**BASE, file: BASE[file].replace(old, new)}


@pytest.mark.parametrize(("file", "old", "new"), COUNTS)
def test_what_is_reached_counts(tmp_path, monkeypatch, base_hash, file, old, new):
    assert hash_of(tmp_path, edited(file, old, new), monkeypatch) != base_hash


@pytest.mark.parametrize(("file", "old", "new"), CHANGES_NOTHING)
def test_what_is_not_reached_changes_nothing(tmp_path, monkeypatch, base_hash, file, old, new):
    assert hash_of(tmp_path, edited(file, old, new), monkeypatch) == base_hash


def test_a_helper_anywhere_on_the_path_counts(tmp_path, monkeypatch):
    hashes = set()
    for number in (1, 2):
        elsewhere = tmp_path / f"elsewhere{number}"
        elsewhere.mkdir()
        (elsewhere / "far_away.py").write_text(f"def factor():\n    return {number}\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(elsewhere)
            files = {"method.py": method("from far_away import factor")}
            hashes.add(hash_of(tmp_path / f"plugin{number}", files, patch))
            sys.modules.pop("far_away", None)

    assert len(hashes) == 2


def test_a_count_of_calls_is_not_a_constant(tmp_path, monkeypatch, base_hash):
    method_text = BASE["method.py"] + "\nglobals().update(CALLS=5)\n"  # as if it had been called

    assert hash_of(tmp_path, {**BASE, "method.py": method_text}, monkeypatch) == base_hash


def test_a_file_that_was_edited_after_its_import_is_not_taken_for_the_code_that_runs(tmp_path, monkeypatch):
    (tmp_path / "method.py").write_text(method(factor="2"))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("method")
    del sys.modules["method"]
    (tmp_path / "method.py").write_text(method(factor="3"))  # as an editor does while inputs are hashed

    fresh = hash_of(tmp_path / "fresh", {"method.py": method(factor="3")}, monkeypatch)

    assert of_function(module.scaled) != fresh


@pytest.mark.parametrize(
    "cycle",
    [
        "def factor(): return other() if 0 else 2\n\ndef other(): return factor()",
        "class factor:\n    def __new__(cls): return 2\n    def again(self): return factor()",
        "LIST = [1]; LIST.append(LIST)\ndef factor(): return LIST[0]",
    ],
)
def test_circles_end(tmp_path, monkeypatch, cycle):
    first = hash_of(tmp_path / "first", {"method.py": method(cycle)}, monkeypatch)

    assert hash_of(tmp_path / "same", {"method.py": method(cycle)}, monkeypatch) == first
    assert (
        hash_of(
            tmp_path / "other",
            {"method.py": method(cycle.replace("2", "3").replace("[1]", "[3]"))},
            monkeypatch,
        )
        != first
    )


def test_declared_files_and_variables_count(tmp_path, monkeypatch):
    declared = method().replace("register=False", 'register=False, depends=["data"], variables=["MASK"]')
    files = {"method.py": declared.replace("factor()", "2"), "data/a.json": "1", "data/b.json": "2"}
    scaled = load(tmp_path, files, monkeypatch).scaled

    hashes = [code_hash(scaled)]
    (tmp_path / "data" / "b.json").write_text("three")
    hashes.append(code_hash(scaled))
    (tmp_path / "data" / "b.json").rename(tmp_path / "data" / "c.json")
    hashes.append(code_hash(scaled))
    monkeypatch.setenv("MASK", "on")
    hashes.append(code_hash(scaled))

    assert len(set(hashes)) == 4
    monkeypatch.delenv("MASK")
    assert code_hash(scaled) == hashes[2]


def test_a_declared_file_that_is_missing_is_an_error(tmp_path, monkeypatch):
    declared = method(factor="2").replace("register=False", 'register=False, depends=["mask.json"]')
    scaled = load(tmp_path, {"method.py": declared}, monkeypatch).scaled

    with pytest.raises(
        ConfigError, match=r"the merge method 'scaled' depends on .*mask.json, which does not exist"
    ):
        code_hash(scaled)


def test_an_evaluator_is_hashed_as_a_method_is(tmp_path, monkeypatch):
    score = (
        "from helpers import factor\n\ndef score(model, *, images: int = 3):\n    return {'x': factor()}\n"
    )
    files = {"method.py": score, "helpers.py": FACTOR}

    first = hash_of(tmp_path / "first", files, monkeypatch)

    assert hash_of(tmp_path / "a", {**files, "helpers.py": "#\n" + FACTOR}, monkeypatch) == first
    assert hash_of(tmp_path / "b", {**files, "helpers.py": FACTOR.replace("2", "3")}, monkeypatch) != first
    assert hash_of(tmp_path / "c", {**files, "method.py": score.replace("= 3", "= 4")}, monkeypatch) != first


def test_sources_are_all_that_an_import_needs(tmp_path, monkeypatch):
    files = {
        "acme/__init__.py": "from . import also\n",
        "acme/also.py": "NUMBER = 1\n",
        "acme/sub/__init__.py": "from .deep import factor\n",
        "acme/sub/deep.py": FACTOR,
        "acme/left_out.py": "x = 1\n",
        "acme/method.py": method("from acme.sub import factor"),
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    module = importlib.import_module("acme.method")

    found = sources(module.scaled)

    for name in set(sys.modules) - before:
        del sys.modules[name]
    assert {path.relative_to(tmp_path).as_posix(): text for path, text in found.items()} == {
        path: text for path, text in files.items() if "left_out" not in path
    }


def test_a_recipe_with_draws_reaches_no_other_code_of_the_api():
    found = sources_of(dare_linear("base", "a", "b", density=0.5))

    package = Path(methods.__file__).parent
    assert {path.name for path in found if path.parent != package} == {"random.py"}
    assert {"linear.py", "dare.py"} <= {path.name for path in found}


def test_no_hash_of_a_built_in_method_holds_a_path_or_an_address():
    for each in all_methods():
        text = reach(each).text
        assert not re.search(r"0x[0-9a-f]{6}|mecha_exp/|/methods/", text), each.identifier


@pytest.fixture(scope="module")
def in_another_process(tmp_path_factory):
    """The hashes of `BASE`, and of the built-in methods with more constants, in a fresh process."""
    own, built_in = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("methods")
    for path, text in BASE.items():
        (own / path).write_text(text)
    for path in Path(methods.__file__).parent.glob("*.py"):
        text = path.read_text()
        at = text.index("\nimport ") if "\nimport " in text else text.index("\nfrom ")
        (built_in / path.name).write_text(f"{text[:at]}\nEXTRA = 5\n{text[at:]}\nMORE = 6\n")
    script = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("mecha_exp.methods", {str(built_in / "__init__.py")!r})
import mecha_exp
sys.modules["mecha_exp.methods"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from mecha_exp.engine.code_hash import code_hash, of_function
from mecha_exp.method_api.registry import all_methods
hashes = {{method.identifier: code_hash(method) for method in all_methods()}}
assert sys.modules["mecha_exp.methods.linear"].EXTRA == 5
sys.path.insert(0, {str(own)!r})
import method
print(json.dumps([of_function(method.scaled), hashes]))
"""
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": str(root), "PYTHONHASHSEED": "3", "PATH": "/usr/bin:/bin", "HOME": str(own)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_hash_is_equal_in_another_folder_and_process(in_another_process, base_hash):
    assert in_another_process[0] == base_hash


def test_unused_constants_make_no_recipe_stale(in_another_process):
    now = {each.identifier: code_hash(each) for each in all_methods()}
    after = in_another_process[1]

    assert len(after) > 90
    assert {name for name in after if after[name] != now[name]} == set()


def lines_of(files: dict[str, str]) -> list[tuple[str, int]]:
    return [
        (file, number)
        for file, text in files.items()
        for number, line in enumerate(text.splitlines())
        if file.endswith(".py") and re.search(r"\d", line)
    ]


PACKAGE = {
    "method.py": method(
        "from pack import gain\nfrom pack.shift import shifted\nOFFSET = 3\n", "gain() + shifted(OFFSET)"
    ),
    "pack/__init__.py": """from .numbers_ import number
SPARE = 4

def gain():
    return number() * 2

def idle():
    return 9
""",
    "pack/numbers_.py": """TABLE = [1, 5, 8]
COUNT = 1  # of 2

def number():
    return TABLE[COUNT]

class Idle:
    x = 6
""",
    "pack/shift.py": """def shifted(x, by=7):
    '''Shift by 7.'''
    y = x - 1
    return y + by
""",
}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=st.sampled_from(lines_of(PACKAGE)), seed=st.integers(0, 2**32))
def test_other_results_have_other_hashes(tmp_path_factory, line, seed):
    """A number in a random line of a package is edited: another result implies another hash."""
    file, number = line
    text = PACKAGE[file].splitlines(keepends=True)
    digits = [match.start() for match in re.finditer(r"\d", text[number])]
    generator = random.Random(seed)
    at = generator.choice(digits)
    text[number] = text[number][:at] + str(generator.randrange(10)) + text[number][at + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        try:
            module = load(tmp_path_factory.mktemp("edited"), {**PACKAGE, file: "".join(text)}, patch)
            result = module.scaled.__wrapped__(1.0)
        except IndexError:
            return
        first = load(tmp_path_factory.mktemp("first"), PACKAGE, patch)
        hashes = code_hashes(module.scaled("a")), code_hashes(first.scaled("a"))

    if result != first.scaled.__wrapped__(1.0):
        assert hashes[0] != hashes[1]
    comment = text[number].find("#")
    if re.search(r"SPARE|return 9|x = 6|'''", text[number]) or -1 < comment < at:
        assert hashes[0] == hashes[1]


def test_what_a_call_is_without_factors_is_part_of_its_methods_hash():
    def chosen(a: mx.Parameter(torch.Tensor), b: mx.Parameter(torch.Tensor)) -> mx.Return(torch.Tensor):
        return a

    def first(a: mx.Node, b: mx.Node) -> mx.Node:
        return a

    def second(a: mx.Node, b: mx.Node) -> mx.Node:
        return b

    graphs = (None, first, second)
    hashes = {code_hash(mx.merge_method(register=False, without=graph)(chosen)) for graph in graphs}

    assert len(hashes) == 3

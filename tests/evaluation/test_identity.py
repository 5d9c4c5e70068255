"""What decides a measurement: other code, data, parameters or variables are another evaluation."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import identity, read_scoring

ANY = {"w": (2, 3)}
EVALUATOR = '''
"""An evaluator."""
from pathlib import Path

from mecha_exp import evaluator
from scale import FACTOR, OTHER


def helper():
    return 4 + OTHER


@evaluator("test_keyed", metric="m", data=["prompts.txt", "images"], variables=["TEST_KEYED"],
           libraries=["yaml"], depends=lambda context, options: {"helper": helper})
def keyed(state_dict, *, stretch: float = 1.0, file: Path = Path("reference.txt")):
    """Measure it."""
    return {"m": FACTOR * stretch}  # a comment
'''
SPLIT = """
from mecha_exp import evaluator


@evaluator("test_keyed", metric="m", splits=("validation", "test"))
def keyed(state_dict, *, split: str):
    return {"m": 1.0}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(EVALUATOR)
    (tmp_path / "scale.py").write_text("FACTOR = 2\nOTHER = 1\n")
    (tmp_path / "prompts.txt").write_text("a cat\n")
    (tmp_path / "reference.txt").write_text("1.0\n")
    (tmp_path / "other.txt").write_text("1.0\n")
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_text("a picture")
    return tmp_path


@pytest.fixture
def key(folder: Path) -> Callable[..., str]:
    """The key of the evaluation as a new process would find it."""

    def of(plugin: str = "mine.py", **settings: object) -> str:
        sys.modules.pop("scale", None)
        spec = importlib.util.spec_from_file_location("test_keyed_module", folder / plugin)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return read_scoring({"name": "test_keyed", **settings}, ANY).evaluations[0].key

    return of


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


CHANGES = {
    "its code": lambda f: edit(f / "mine.py", "FACTOR * stretch", "FACTOR + stretch"),
    "what it imports from its folder": lambda f: edit(f / "scale.py", "FACTOR = 2", "FACTOR = 3"),
    "a data file": lambda f: (f / "prompts.txt").write_text("a dog\n"),
    "a file in a data folder": lambda f: (f / "images/a.png").write_text("another picture"),
    "a file more in a data folder": lambda f: (f / "images/b.png").write_text("a picture"),
    "a file renamed in a data folder": lambda f: (f / "images/a.png").rename(f / "images/b.png"),
    "the file of a parameter": lambda f: (f / "reference.txt").write_text("2.0\n"),
    "a default": lambda f: edit(f / "mine.py", "stretch: float = 1.0", "stretch: float = 2.0"),
    "a function that it depends on": lambda f: edit(f / "mine.py", "return 4", "return 5"),
    "what such a function imports": lambda f: edit(f / "scale.py", "OTHER = 1", "OTHER = 2"),
    "its version": lambda f: edit(f / "mine.py", 'metric="m"', 'metric="m", version=2'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_evaluation(key, folder, change):
    before = key()

    CHANGES[change](folder)

    assert key() != before


def test_another_environment_variable_is_another_evaluation(key, monkeypatch):
    monkeypatch.delenv("TEST_KEYED", raising=False)
    unset = key()
    monkeypatch.setenv("TEST_KEYED", "")
    empty = key()
    monkeypatch.setenv("TEST_KEYED", "x")

    assert len({unset, empty, key()}) == 3


@pytest.mark.parametrize("library", ["yaml", "torch"])
def test_another_version_of_a_library_is_another_evaluation(key, monkeypatch, library):
    before, version = key(), identity._version
    monkeypatch.setattr(identity, "_version", lambda name: "0" if name == library else version(name))

    assert key() != before


def test_what_torch_was_built_for_is_not_part_of_it(key, monkeypatch):
    versions = []
    for build in ("2.9.0+cpu", "2.9.0+cu130"):
        identity._version.cache_clear()
        monkeypatch.setattr(identity, "version", lambda name, build=build: build)
        versions.append(key())
    identity._version.cache_clear()

    assert versions[0] == versions[1]


def test_another_plugins_evaluator_of_the_same_name_is_another_evaluation(key, folder):
    (folder / "theirs.py").write_text(EVALUATOR.replace("FACTOR * stretch", "1000.0"))

    assert key("theirs.py") != key()


SAME = {
    "nothing": lambda f: None,
    "a comment": lambda f: edit(f / "mine.py", "# a comment", "# another one"),
    "a docstring": lambda f: edit(f / "mine.py", "Measure it.", "Measure it well."),
    "a file that it does not read": lambda f: (f / "other.txt").write_text("2.0\n"),
    "an environment variable that it does not read": lambda f: None,
}


@pytest.mark.parametrize("change", SAME)
def test_the_same_evaluation(key, folder, change, monkeypatch):
    before = key()

    SAME[change](folder)
    monkeypatch.setenv("TEST_NOT_KEYED", change)

    assert key() == before


def test_a_path_counts_by_its_content(key):
    assert key(file="other.txt") == key(file="reference.txt") == key()


@pytest.mark.parametrize(
    "annotation", ["list[Path]", "tuple[Path, ...]", "list[Path] | None", "list[str]", "object"]
)
def test_files_in_a_list_count_by_their_content(key, folder, annotation):
    edit(folder / "mine.py", "float = 1.0", f"float = 1.0, files: {annotation} = ()")
    before = key(files=["other.txt"])

    (folder / "other.txt").write_text("2.0\n")

    assert key(files=["other.txt"]) != before


def test_a_text_that_is_the_name_of_a_file_counts_by_its_content(key, folder):
    edit(folder / "mine.py", "float = 1.0", 'float = 1.0, text: str = "x"')
    before, other = key(text="other.txt"), key(text="nothing")

    (folder / "other.txt").write_text("2.0\n")

    assert key(text="other.txt") != before
    assert key(text="nothing") == other


def test_a_file_of_a_list_that_is_missing_is_an_error_before_any_work(key, folder):
    edit(folder / "mine.py", "float = 1.0", "float = 1.0, files: list[Path] = ()")

    with pytest.raises(ConfigError, match=r"evaluator\.files: nowhere\.txt does not exist"):
        key(files=["reference.txt", "nowhere.txt"])
    with pytest.raises(
        ConfigError, match=r"evaluator\.files: expected a list of paths, got 'reference\.txt'"
    ):
        key(files="reference.txt")


def test_parameters_and_splits_are_part_of_it(key, folder):
    assert key(stretch=2.0) != key()

    (folder / "mine.py").write_text(SPLIT)
    key()
    (validation,) = read_scoring({"name": "test_keyed"}, ANY).evaluations
    assert validation.key != validation.on("test").key


def test_a_data_file_that_is_missing_is_an_error_before_any_work(key, folder):
    (folder / "prompts.txt").unlink()

    with pytest.raises(ConfigError, match=r"'test_keyed' reads .*prompts\.txt, which does not exist"):
        key()


def test_the_file_of_a_parameter_that_is_missing_is_an_error_before_any_work(key):
    with pytest.raises(ConfigError, match=r"evaluator\.file: nowhere\.txt does not exist"):
        key(file="nowhere.txt")

"""Files of the user's own are imported once, and what is wrong with one is said with its place."""

from pathlib import Path

import pytest

from mecha_exp import ConfigError, RecipeError, build_recipe
from mecha_exp.__main__ import main
from mecha_exp.architectures import resolve
from mecha_exp.evaluation import all_evaluators
from mecha_exp.plugins import load_plugins

DEFINES = (
    "from mecha_exp import evaluator\nevaluator({name!r}, metric='m')(lambda state_dict: {{'m': 1.0}})\n"
)


def test_a_file_a_folder_and_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "more").mkdir()
    for place, name in (("one", "test_p1"), ("more/two", "test_p2"), ("test_plugin_module", "test_p3")):
        (tmp_path / f"{place}.py").write_text(DEFINES.format(name=name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    load_plugins(["one.py", "more", "test_plugin_module"])

    assert {"test_p1", "test_p2", "test_p3"} <= all_evaluators().keys()


def test_two_plugins_with_an_evaluator_of_one_name_are_refused_by_name(tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(DEFINES.format(name="test_taken"))
    load_plugins([str(tmp_path / "first.py")])
    load_plugins([str(tmp_path / "first.py")])  # the same one again

    with pytest.raises(ConfigError, match="two evaluators are named 'test_taken'") as error:
        load_plugins([str(tmp_path / "second.py")])

    assert all(str(tmp_path / f"{name}.py") in str(error.value) for name in ("first", "second"))


def test_a_plugin_that_takes_the_name_of_a_bundled_evaluator_is_refused(tmp_path: Path):
    all_evaluators()
    (tmp_path / "mine.py").write_text(DEFINES.format(name="digits"))

    with pytest.raises(ConfigError, match="two evaluators are named 'digits'"):
        load_plugins([str(tmp_path / "mine.py")])


def test_a_file_is_imported_once(tmp_path: Path):
    path = tmp_path / "counts.py"
    path.write_text(f"with open({str(tmp_path / 'log')!r}, 'a') as f: f.write('x')\n")

    load_plugins([str(path)])
    load_plugins([str(path)])

    assert (tmp_path / "log").read_text() == "x"


def test_what_is_wrong_is_said_at_once_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("\n1 / 0\n")
    Path("worse.py").write_text("import no_such_package\n")
    Path("ends.py").write_text("import sys\n\nsys.exit('as a script')\n")

    with pytest.raises(ConfigError) as missing:
        load_plugins(["brokn.py", "broken.py", "no_such_module"])
    with pytest.raises(ConfigError) as broken:
        load_plugins(["broken.py", "worse.py", "ends.py"])

    for words in (
        "brokn.py does not exist. Did you mean 'broken.py'?",
        "there is no module, file or folder 'no_such_module'",
    ):
        assert words in str(missing.value)
    for words in (
        "broken.py cannot be imported: ZeroDivisionError: division by zero",
        "line 2",
        "worse.py cannot be imported: ModuleNotFoundError",
        "ends.py cannot be imported: SystemExit: as a script",
    ):
        assert words in str(broken.value)


def test_nothing_is_run_before_every_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package").mkdir()
    for file in ("runs.py", "package/__init__.py", "package/part.py"):
        (tmp_path / file).write_text("open('log', 'w').close()\n")

    for missing in ("no.py", "package.prat", "no.such", ".", "a..b", "package.part.deeper"):
        if not Path(missing).is_dir():
            with pytest.raises(ConfigError):
                load_plugins(["runs.py", "package.part", missing])

    assert not (tmp_path / "log").exists()


def test_a_plugin_alone_is_a_list_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("alone.py").write_text(DEFINES.format(name="test_p4"))

    load_plugins("alone.py")

    assert "test_p4" in all_evaluators()


def test_of_a_folder_only_the_files_that_import_us_are_run(tmp_path: Path):
    (tmp_path / "train.py").write_text("# for mecha_exp\nraise SystemExit('a training')\n")
    (tmp_path / "evaluates.py").write_text(DEFINES.format(name="test_p5"))

    load_plugins([str(tmp_path)])

    assert "test_p5" in all_evaluators()


OWN_METHOD = """
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method


@merge_method(elementwise=True)
def {name}(
    a: Parameter(Tensor),
    b: Parameter(Tensor),
    alpha: Parameter(Tensor) = 0.5,
    k: Parameter(float, ge=0) = 1.0,
) -> Return(Tensor):
    return a + alpha * k * (b - a)
"""


def test_methods_of_the_working_folder_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "mine.py").write_text(OWN_METHOD.format(name="test_own_local"))
    (tmp_path / "methods" / "unrelated.py").write_text("raise SystemExit('not a plugin')")
    (tmp_path / "named.py").write_text(OWN_METHOD.format(name="test_own_named"))
    monkeypatch.chdir(tmp_path)

    load_plugins(["named.py"])

    for name in ("test_own_local", "test_own_named"):
        assert build_recipe({"method": name, "a": "a", "b": "b", "k": 2}).method.identifier == name
        with pytest.raises(RecipeError, match=r"recipe\.k: -1 is out of range \[0, inf\)"):
            build_recipe({"method": name, "a": "a", "b": "b", "k": -1})


ACME = "identifier: {name}\ncomponents: {{net: {{keys: {{'a.{{0..1}}.weight': [3]}}}}}}\n"


@pytest.fixture
def own_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_configs").mkdir()
    return tmp_path


def test_model_configs_of_the_folder_the_environment_and_the_plugins_are_known(own_configs, monkeypatch):
    places = {"one": "model_configs/one.yaml", "two": "two.yaml", "three": "more/three.yml"}
    (own_configs / "more").mkdir()
    for name, place in places.items():
        (own_configs / place).write_text(ACME.format(name=f"{name}-x"))
    (own_configs / "model_configs" / "training.yaml").write_text("of: something else\n")
    monkeypatch.setenv("MECHA_MODEL_CONFIGS", "two.yaml")

    load_plugins(["more"])
    load_plugins(["more"])

    assert all(list(resolve(f"{name}-x").keys()) == ["a.0.weight", "a.1.weight"] for name in places)


def test_what_is_wrong_with_model_configs_is_said_with_their_files(own_configs, monkeypatch):
    (own_configs / "model_configs" / "acme.yaml").write_text("identifier: acme-x\ncomponent: {}\n")
    (own_configs / "model_configs" / "mine.yaml").write_text(ACME.format(name="sdxl-sgm"))
    monkeypatch.setenv("MECHA_MODEL_CONFIGS", "nowhere.yaml")

    with pytest.raises(ConfigError) as error:
        load_plugins([])

    for words in (
        "acme.yaml",
        "Did you mean 'components'?",
        "mine.yaml: there is a model config",
        "nowhere.yaml",
    ):
        assert words in str(error.value)


def test_a_run_and_a_look_at_a_model_know_the_configs_of_the_folder(own_configs, monkeypatch, capsys):
    (own_configs / "model_configs" / "acme.yaml").write_text(ACME.format(name="acme-x"))
    monkeypatch.setattr("sys.argv", ["mecha_exp", "info", "acme-x"])

    assert main() == 0
    assert "acme-x: 2 keys" in capsys.readouterr().out

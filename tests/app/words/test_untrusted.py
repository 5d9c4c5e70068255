"""Files from elsewhere are data: recipes, models and configuration files run no code."""

import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from state_dicts import random_model

from mecha_exp.errors import CheckpointError
from mecha_exp.sources.search import packaged

CODE = "raise SystemExit('this code ran')"


def package(folder: Path, name: str, *, declared: bool) -> Path:
    """Install a package with a model, whose import ends the process, into a folder."""
    inner = folder / name
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text(CODE)
    save_file(random_model(1), inner / "a.safetensors")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mecha_exp.models]\nmodels = {name}\n" if declared else "")
    return inner


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages; the current folder is another one, and is on Python's path too."""
    current = tmp_path / "current"
    current.mkdir()
    monkeypatch.chdir(current)
    monkeypatch.setattr(sys, "path", ["", str(current), str(tmp_path / "site"), *sys.path])
    return tmp_path / "site"


def test_a_package_that_carries_models_is_found_without_being_imported(installed: Path):
    folder = package(installed, "carrier", declared=True)

    assert packaged("pkg://carrier/a.safetensors") == folder / "a.safetensors"
    assert packaged("pkg://carrier") == folder
    assert "carrier" not in sys.modules


def test_a_package_that_says_nothing_is_not_looked_at(installed: Path):
    package(installed, "silent", declared=False)

    with pytest.raises(CheckpointError, match="'silent' that says that it carries models, by an entry point"):
        packaged("pkg://silent/a.safetensors")
    assert "silent" not in sys.modules


def test_the_current_folder_is_not_searched(installed: Path):
    package(Path(), "planted", declared=True)

    with pytest.raises(CheckpointError, match="there is no package 'planted' that says"):
        packaged("pkg://planted/a.safetensors")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("pkg://", "'' is not the name of a package"),
        ("pkg://..", r"'\.\.' is not the name of a package"),
        ("pkg://.x/a", "is not the name of a package"),
        ("pkg://mecha_exp/../../etc/passwd", "leaves its package: name a file in it"),
        ("pkg://mecha_exp//etc/passwd", "leaves its package"),
        ("pkg://mecha_exp/a\0b", "leaves its package"),
        ("pkg://sys/a.safetensors", "there is no package 'sys' that says"),
        ("pkg://os.path/a", "there is no package 'os.path' that says"),
        ("pkg://mecha_exp.nothing/a", "there is no package 'mecha_exp.nothing'"),
    ],
)
def test_what_is_not_a_package_is_named(path: str, message: str):
    with pytest.raises(CheckpointError, match=message):
        packaged(path)


def test_a_recipe_does_not_import_what_it_names(app, folder: Path):
    package(folder, "evil", declared=False)
    (folder / "r.mecha").write_text('version 0.1.0\nmodel "pkg://evil/a.safetensors"\n')

    outcome = app("plan", "r.mecha", tracked=True)

    assert outcome.status == 1
    assert "there is no package 'evil' that says that it carries models" in outcome.err


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("callbacks: {x: {_target_: builtins.exec, _args_: ['raise SystemExit(3)']}}", "hydra.callbacks"),
        ("job: {env_set: {LD_PRELOAD: evil.so}}", "hydra.job"),
        ("launcher: {_target_: os.abort}", "hydra.launcher"),
        ("sweeper: {_target_: os.abort}", "hydra.sweeper._target_"),
        ("job_logging: {formatters: {x: {'()': os.abort}}}", "hydra.job_logging"),
    ],
)
@pytest.mark.parametrize("flag", [(), ("--cfg", "job")])
def test_a_configuration_file_cannot_reach_the_settings_of_hydra(
    app, folder: Path, settings: str, named: str, flag: tuple[str, ...]
):
    (folder / "mine" / "recipe").mkdir(parents=True)
    text = f"# @package _global_\nhydra:\n  {settings}\nrecipe: {{method: n_average}}\n"
    (folder / "mine" / "recipe" / "evil.yaml").write_text(text)

    outcome = app("--config-dir", "mine", "recipe=evil", *flag)

    assert outcome.status == 1
    assert f"recipe/evil.yaml sets {named}, which can run code" in outcome.err + outcome.out


def test_a_configuration_file_may_say_what_is_varied(app, folder: Path):
    (folder / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {alpha: '0.3,0.5'}}}\n"
    (folder / "mine" / "experiment" / "two.yaml").write_text(text)

    outcome = app("--config-dir", "mine", "experiment=two", "output=none", "debug=plan")

    assert outcome.status == 0, outcome.err

"""What a user installs is whole: every file, importable from any folder, and light until it is used."""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from wheels import FOLDERS, PROJECT, ROOT

import mecha_exp
from mecha_exp.cli import VERBS

SHIPPED = {".css", ".html", ".js", ".json", ".py", ".pyi", ".yaml", ".safetensors", ".mecha", ".typed"}


def source_files() -> Iterator[str]:
    """The files under the mapped folders that belong into the wheel, as they are named there."""
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SHIPPED:
                yield package.replace(".", "/") + "/" + path.relative_to(ROOT / folder).as_posix()


def test_every_package_is_listed():
    homes = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }

    assert homes == set(PROJECT["tool"]["setuptools"]["packages"])


def test_the_wheel_has_every_file(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())

    assert set(source_files()) - packed == set()
    assert {
        "mecha_exp/py.typed",
        "mecha_exp/conf/recipe/ties.yaml",
        "mecha_exp/methods/ties.py",
        "mecha_exp/examples/digits/base.safetensors",
    } <= packed


def test_the_wheel_puts_nothing_else_at_top_level(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}

    assert tops == {"mecha_exp", "hydra_plugins", f"mecha_exp-{mecha_exp.__version__}.dist-info"}
    plugins = {name for name in names if name.startswith("hydra_plugins/")}
    assert plugins == {"hydra_plugins/mecha_exp/__init__.py"}  # Hydra finds plugins in that package alone


def test_the_wheel_carries_the_licence(wheel):
    [licence] = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/LICENSE")]

    assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()


def test_the_version_is_the_same_everywhere(wheel):
    [distribution] = metadata.distributions(name="mecha_exp", path=[str(wheel)])

    assert mecha_exp.__version__ == distribution.version
    assert f"\n## [{distribution.version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_installed_wheel_is_what_runs(installed, tmp_path):
    code = "import mecha_exp.methods; print(mecha_exp.__file__, *mecha_exp.__path__, sep='\\n')"

    answer = installed.run("python", "-c", code, folder=tmp_path)

    homes = [Path(line).resolve() for line in answer.stdout.splitlines()]
    assert len(homes) == 2, answer.stderr
    assert all(installed.scripts.parent.resolve() in home.parents for home in homes)


def test_the_installed_wheel_merges_the_demo_in_any_folder(installed, tmp_path):
    words = ["-m", "mecha_exp", "recipe=weighted_sum", "tracking=none"]

    answer = installed.run("python", *words, folder=tmp_path)

    assert answer.returncode == 0, answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {"runs", "store"}
    [run] = (tmp_path / "outputs" / "runs").iterdir()
    assert {"model.safetensors", "metrics.json", ".hydra"} <= {path.name for path in run.iterdir()}


def test_the_console_script_helps(installed, tmp_path):
    answer = installed.run("mecha-exp", "--help", folder=tmp_path)

    assert answer.returncode == 0, answer.stderr
    assert "recipe=ties" in answer.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_the_container_runs_the_demo(tmp_path):
    builder = next((name for name in ("docker", "podman") if shutil.which(name)), None)
    if builder is None or subprocess.run([builder, "info"], capture_output=True, timeout=60).returncode:
        pytest.skip("no program that builds containers answers")

    subprocess.run(
        [builder, "build", "-f", "Containerfile", "-t", "mecha_exp_test", "."], cwd=ROOT, check=True
    )
    mount = ["-v", f"{tmp_path}:/work", "mecha_exp_test"]
    subprocess.run([builder, "run", "--rm", *mount, "alpha=0.3,0.5", "output=none", "-m"], check=True)

    assert len([*tmp_path.glob("outputs/multiruns/*/sweep.csv")]) == 1


@pytest.mark.parametrize("has_environment", [True, False])
def test_a_python_without_our_packages_says_what_to_type(tmp_path, has_environment):
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "mecha_exp", folder / "mecha_exp", ignore=shutil.ignore_patterns("__pycache__"))
    activate = folder / ".venv" / ("Scripts" if os.name == "nt" else "bin") / "activate"
    if has_environment:
        activate.parent.mkdir(parents=True)
        activate.touch()

    command = [sys.executable, "-S", "-m", "mecha_exp", "recipe=ties"]  # without site-packages
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    cure = f"source '{activate}'" if has_environment else f"cd '{folder}' && "
    assert answer.returncode == 1 and "Traceback" not in answer.stderr
    assert f"has none of the packages that mecha_exp needs. Type: {cure}" in answer.stderr


def distribution(module: str) -> str:
    """The name by which pip knows a module."""
    other = {"PIL": "pillow", "hydra": "hydra-core", "sklearn": "scikit-learn", "yaml": "pyyaml"}
    return other.get(module, module).replace("_", "-")


def test_everything_that_is_imported_is_declared():
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"], *itertools.chain(*extras.values())]
    declared = {re.match(r"[\w-]+", text)[0].replace("_", "-") for text in needed}
    through_others = {"botocore"}  # of s3fs, whose errors it raises

    trees = [
        ast.parse(file.read_text(encoding="utf-8"))
        for home in FOLDERS.values()
        for file in (ROOT / home).rglob("*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    modules = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)

    assert {distribution(module) for module in modules} - declared == {"hydra-plugins"} | through_others


def test_a_program_that_only_merges_needs_the_few_packages_that_the_readme_names(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    few = set(re.search(r"--no-deps -e \. && pip install ([\w -]+)`", readme)[1].split())
    application = {re.match(r"[\w-]+", text)[0] for text in PROJECT["project"]["dependencies"]} - few
    program = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        other = {{"PIL": "pillow", "hydra": "hydra-core"}}
        if other.get(name, name) in {application - {"llvmlite"}}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import mecha_exp as me
from mecha_exp.examples import digits
from pathlib import Path

home = Path(digits.__file__).parent
files = [str(home / f"{{name}}.safetensors") for name in ("base", "expert_0_3", "expert_4_6")]
me.merge(me.ties(*files), "ties.safetensors")
"""

    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ties.safetensors").exists()


def imported(*arguments: str, cwd: Path = ROOT) -> set[str]:
    """The top-level modules that a Python command imports."""
    command = [sys.executable, "-X", "importtime", *arguments]
    answer = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return set(re.findall(r"^import time: .*\| +(\w+)", answer.stderr, re.MULTILINE))


def test_importing_the_package_costs_nothing():
    modules = imported("-c", "import mecha_exp")

    assert "mecha_exp" in modules
    assert not modules & {"torch", "numpy", "numba", "hydra", "omegaconf", "mlflow", "matplotlib"}


@pytest.mark.parametrize("verb", ["", *VERBS, "adapters", "comfyui", "push"])
def test_asking_for_help_costs_little(verb):
    modules = imported("-m", "mecha_exp", *verb.split(), "--help")

    assert {"mecha_exp", "argparse"} <= modules
    assert not modules & {"torch", "numba", "mlflow", "matplotlib"}


@pytest.mark.parametrize(
    "words", [("ls",), ("table",), ("why",), ("show", "SWEEP/0"), ("diff", "SWEEP/0", "SWEEP/1")]
)
def test_looking_at_results_costs_little(words, looked_at):
    folder, sweep = looked_at
    words = [word.replace("SWEEP", sweep) for word in words]

    assert not imported("-m", "mecha_exp", *words, cwd=folder) & {"torch", "numba", "mlflow", "matplotlib"}


@pytest.fixture(scope="module")
def looked_at(as_a_user, tmp_path_factory):
    """A folder with a sweep, and the sweep's name; what torch uses here is known from the first look."""
    folder = tmp_path_factory.mktemp("sweeps")
    for words in (
        ("alpha=0.3,0.5", "output=none", "tracking=none", "hydra.sweep.dir=outputs/a", "-m"),
        ("ls",),
    ):
        assert as_a_user(*words, cwd=folder).status == 0
    return folder, "outputs/a"


def test_the_recipe_of_a_method_is_kept_for_help_and_completion(tmp_path, monkeypatch):
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path))
    command = ("-m", "mecha_exp", "recipe=slerp", "--help")

    assert "torch" in imported(*command)
    assert "torch" not in imported(*command)

"""What the core does not need: each guest is deleted from a copy, in which the core works as before.

The guests are the packages above the core in the import contract of `pyproject.toml`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
LAYERS = re.search(r'^layers = \[\n(.*?)^    "cli",', PROJECT, re.MULTILINE | re.DOTALL)[1]
GUESTS = re.findall(r"\w+", "".join(re.findall(r'^    ("[^"]+"),', LAYERS, re.MULTILINE)))[1:]
ANNOUNCED = re.compile(r'^\[project\.entry-points\."(.*)"\].*\n((?:[\w"].*\n)+)', re.MULTILINE)
LEFT_OUT = ("bench", "docs", "parity", "tests/golden")
NO_OTHER_COPY = """
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""
MERGE = """
import sys
import mecha_exp.api
import mecha_exp as m
m.merge(m.weighted_sum("a.safetensors", "b.safetensors", alpha=0.25), "made.safetensors")
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("mecha_exp.")}))
"""
GONE = "import importlib.util, sys; print(*filter(importlib.util.find_spec, sys.argv[1:]))"
OF_THE_CORE = (
    *("checkpoint/test_checkpoint_header.py", "lab/test_lab_signature.py", "method_api/test_own_methods.py"),
    *("recipe/test_recipe_yaml.py", "app/sweeps/test_sweep_points.py", "verdict/test_verdict_statistics.py"),
)


class Copy:
    """A copy of the project without some of its packages."""

    def __init__(self, folder: Path, without: Iterable[str]) -> None:
        self.folder, self._without = folder, tuple(without)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        gone = tuple(f"mecha_exp/{guest}/" for guest in self._without)
        for name in names.splitlines():
            if (ROOT / name).is_file() and not name.startswith((*LEFT_OUT, *gone)):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        self._announce()

    def _announce(self) -> None:
        """Write the entry points that are left, and hide the project that is installed."""
        groups = ANNOUNCED.findall(PROJECT)
        gone = re.compile(rf".*\"mecha_exp\.({'|'.join(self._without)})\b.*\n")
        text = "".join(f"[{group}]\n{gone.sub('', lines)}" for group, lines in groups)
        info = self.folder / "mecha_exp.egg-info"
        info.mkdir()
        (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mecha_exp\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(text.replace('"', ""))
        (self.folder / "sitecustomize.py").write_text(NO_OTHER_COPY)
        (self.folder / "pyproject.toml").write_text(ANNOUNCED.sub("", PROJECT))

    def run(self, *words: str, folder: Path) -> str:
        return run(self.folder, *words, folder=folder)


def run(project: Path, *words: str, folder: Path, status: int = 0) -> str:
    """What a command of Python prints, with the code of a project; what it says of an error."""
    environment = {**os.environ, "PYTHONPATH": str(project), "COLUMNS": "100"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


def save_two(folder: Path) -> None:
    save_file({"w": np.zeros(4, np.float32)}, folder / "a.safetensors")
    save_file({"w": np.full(4, 8, np.float32)}, folder / "b.safetensors")


def works(copy: Copy, folder: Path) -> None:
    """Check that a copy merges from Python, and sweeps and explains itself on the command line."""
    save_two(folder)
    copy.run("-c", MERGE, folder=folder)
    assert load_file(folder / "made.safetensors")["w"].tolist() == [2.0] * 4

    command = ("-m", "mecha_exp")
    swept = copy.run(*command, "recipe=ties", "alpha=0.3,0.5", "tracking=none", "-m", folder=folder)
    assert "alpha=0.3" in swept and "alpha=0.5" in swept
    assert "recipe=ties" in copy.run(*command, "--help", folder=folder)
    assert "sdxl-sgm" in copy.run(*command, "info", folder=folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("recipe=mergekit", "recipe.path=ties.yml"),
            "it is read by a package that is not installed",
        ),
        (("output=adapter",), "made of a merged model by a package that is not installed"),
        (("evaluator.name=digits",), "unknown evaluator 'digits'"),
    ],
)
def test_what_a_guest_brings_is_named_where_it_is_gone(
    bare: Copy, tmp_path: Path, words: tuple[str, ...], message: str
):
    (tmp_path / "ties.yml").write_text("merge_method: ties")
    done = run(bare.folder, "-m", "mecha_exp", *words, "tracking=none", folder=tmp_path, status=1)

    assert message in " ".join(done.split())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy without any guest."""
    return Copy(tmp_path_factory.mktemp("copy"), GUESTS)


def test_the_core_works_without_its_guests(bare: Copy, tmp_path: Path):
    assert bare.run("-c", GONE, *(f"mecha_exp.{guest}" for guest in GUESTS), folder=tmp_path).split() == []
    works(bare, tmp_path)


def test_a_merge_loads_the_core_alone(tmp_path: Path):
    save_two(tmp_path)

    loaded = run(ROOT, "-c", MERGE, folder=tmp_path).split()

    assert {"api", "checkpoint", "engine"} <= {*loaded}
    assert {*loaded} & {*GUESTS} == set()


@pytest.mark.heavy
@pytest.mark.parametrize("guest", GUESTS)
def test_the_core_is_whole_without_a_guest(guest: str, tmp_path: Path):
    copy = Copy(tmp_path / "copy", [guest])

    works(copy, tmp_path)
    tests = [f"tests/{name}" for name in OF_THE_CORE]
    copy.run("-m", "pytest", *tests, "-p", "no:cacheprovider", folder=copy.folder)

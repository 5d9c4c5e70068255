"""Packages of others read models and calls in recipes: they announce it by entry points."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mecha_exp
from mecha_exp import ConfigError
from mecha_exp.entry_points import announced

REPOSITORY = Path(mecha_exp.__file__).parents[1]
READER = """
import numpy as np
import torch

from mecha_exp.graph.nodes import InMemory, ModelNode
from mecha_exp.method_api.views import View
from mecha_exp.sources.memory import MemorySource
from mecha_exp.sources.readers import Reader
from mecha_exp.sources.source import RenamedSource


class Archives(Reader):
    def opens(self, path):
        return path.suffix == ".npz"

    def open(self, path):
        with np.load(path, allow_pickle=False) as archive:
            return MemorySource(InMemory({name: torch.from_numpy(archive[name]) for name in archive.files}))


class Halves(Reader):
    def read(self, call, reading):
        if call.method.identifier != "pick_component" or not isinstance(call.children[0], ModelNode):
            return None
        source, start = reading.sources[call.children[0]], call.literals["component"] + "."
        keys = {key.removeprefix(start): key for key in source.keys() if key.startswith(start)}
        return View(call, lambda: RenamedSource(source, keys))
"""
MERGE = """
import json
import mecha_exp as m
from mecha_exp.engine.code_hash import code_hashes
recipe = m.weighted_sum(m.pick_component("a.npz", "left"), "b.npz", alpha=0.25)
m.merge(recipe, "made.safetensors")
print(json.dumps(code_hashes(recipe)))
"""


def install(site: Path, name: str, code: str, *entries: str) -> None:
    """Install a package of one module, with its entry points (of readers, or below another heading)."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[mecha_exp.readers]", *entries]) + "\n")


def merged(site: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the merge in a process that finds the packages of a folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, site)))}
    command = [sys.executable, "-c", MERGE]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


def test_a_package_of_others_reads_files_and_calls_of_recipes(tmp_path: Path):
    site = tmp_path / "site"
    install(site, "archives", READER, "archives = archives:Archives", "halves = archives:Halves")
    np.savez(tmp_path / "a.npz", **{"left.w": np.zeros(4, np.float32), "right.w": np.ones(4, np.float32)})
    np.savez(tmp_path / "b.npz", w=np.full(4, 8, np.float32))

    done = merged(site, tmp_path)

    assert done.returncode == 0, done.stderr
    assert {key: value.tolist() for key, value in load_file(tmp_path / "made.safetensors").items()} == {
        "w": [2.0] * 4
    }


PACKAGE = (
    READER
    + """

from torch import Tensor
from mecha_exp import Parameter, Return, evaluator, merge_method


@merge_method
def half_of_the_way(a: Parameter(Tensor), b: Parameter(Tensor), *, alpha: float = 0.5) -> Return(Tensor):
    return a + alpha / 2 * (b - a)


@evaluator("evenness", metric="evenness")
def evenness(state_dict):
    return {"evenness": -float(state_dict["w"].std())}


from mecha_exp.recipe.foreign import ForeignRecipe, RecipeReader


class Means(RecipeReader):
    suffixes = (".means",)

    def read(self, path, values, folders, offline):
        return ForeignRecipe(half_of_the_way(*path.read_text().split(), **values))

    def paths(self, path):
        return ["alpha"]


def count(words):
    with np.load(*words, allow_pickle=False) as archive:
        print(len(archive.files), "tensors")
    return 0
"""
)


def test_a_package_of_others_is_used_from_the_command_line(tmp_path: Path):
    groups = {
        "methods": "half_of_the_way = archives",
        "evaluators": "evenness = archives",
        "recipes": "means = archives:Means",
        "verbs": "count = archives:count",
    }
    entries = [line for group, entry in groups.items() for line in (f"[mecha_exp.{group}]", entry)]
    install(tmp_path / "site", "archives", PACKAGE, "archives = archives:Archives", *entries)
    np.savez(tmp_path / "a.npz", w=np.zeros(4, np.float32))
    np.savez(tmp_path / "b.npz", w=np.arange(4, dtype=np.float32))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, tmp_path / "site")))}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "mecha_exp", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    sweep = run(
        *("recipe=half_of_the_way", "models.experts=[a.npz,b.npz]", "models.base=null", "alpha=0.5,1"),
        *("evaluator.name=evenness", "output=none", "tracking=none", "-m"),
    )
    assert "evenness -0.3227" in sweep and "evenness -0.6455" in sweep
    assert "half_of_the_way" in run("info", "methods", "half_of_the_way")

    (tmp_path / "ab.means").write_text("a.npz b.npz")
    run("merge", "ab.means", "made.safetensors", "-p", "alpha", "1")
    assert load_file(tmp_path / "made.safetensors")["w"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert run("count", "a.npz") == "1 tensors\n"


def test_an_entry_point_that_brings_nothing_of_its_name_is_named(tmp_path: Path):
    install(tmp_path / "site", "archives", READER, "[mecha_exp.evaluators]", "evenness = archives")
    code = "from mecha_exp.evaluation.registry import named_evaluator; named_evaluator('evenness')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, tmp_path / "site")))}

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)

    assert "archives, an entry point of mecha_exp.evaluators, defines no evaluator 'evenness'" in done.stderr


def test_the_code_of_a_reader_of_others_is_part_of_what_decides_a_result(tmp_path: Path):
    np.savez(tmp_path / "a.npz", **{"left.w": np.zeros(4, np.float32)})
    np.savez(tmp_path / "b.npz", w=np.full(4, 8, np.float32))
    hashes = []
    for name, code in (("one", READER), ("two", READER.replace('== ".npz"', 'in (".npz", ".npy")'))):
        install(tmp_path / name, "archives", code, "archives = archives:Archives", "halves = archives:Halves")
        hashes.append(json.loads(merged(tmp_path / name, tmp_path).stdout))

    first, other = hashes
    assert [name for name in first if first[name] != other[name]] == ["reader archives.Archives"]
    assert not any(name.startswith("reader mecha_exp") for name in first)


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path):
    install(tmp_path / "site", "broken", "import no_such_package", "worn = broken:Reader")
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "a.npz")

    done = merged(tmp_path / "site", tmp_path)

    assert "'worn' of the entry points mecha_exp.readers, broken:Reader, cannot be imported" in done.stderr
    assert "No module named 'no_such_package'. Install its package again, or remove it." in done.stderr


def test_packages_in_the_current_folder_are_not_loaded(tmp_path: Path):
    install(tmp_path, "planted", "raise SystemExit('this code ran')", "planted = planted:Reader")
    np.savez(tmp_path / "a.npz", w=np.ones(2))

    done = merged(tmp_path / "nowhere", tmp_path)

    assert "this code ran" not in done.stderr + done.stdout
    assert done.returncode == 1


def test_an_installation_older_than_the_code_is_told_how_to_mend_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mecha_exp.entry_points._announcements", list)  # of a time without entry points
    announced.cache_clear()
    with pytest.raises(ConfigError, match=r"announces no mecha_exp\.verbs\. Install it again: pip install"):
        announced("mecha_exp.verbs")
    assert announced("mecha_exp.others") == {}
    announced.cache_clear()

"""Same signature, same bytes: what is in a signature, what is not, and how inputs are read for it."""

import contextlib
import hashlib
import importlib
import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import EngineOptions, add_difference_ties, model, weighted_sum
from mecha_exp.engine.code_hash import code_hashes
from mecha_exp.errors import CheckpointError, RecipeError
from mecha_exp.graph.nodes import Node, models_of
from mecha_exp.lab import content_hash
from mecha_exp.lab.content_hash import content_of, contents_of, size_of, unread_bytes
from mecha_exp.lab.signature import Signature, signature_of


def signed(
    recipe: Node, contents: str = "ab", options: EngineOptions | None = None, **output: str
) -> Signature:
    by_model = dict(zip(models_of(recipe), contents, strict=True))
    return signature_of(recipe, by_model, options or EngineOptions(), output)


SUM = weighted_sum("a", "b", alpha=0.3)


@pytest.mark.parametrize(
    "other",
    [
        signed(weighted_sum("a", "b", alpha=0.30000000000000004)),
        signed(SUM, "ba"),
        signed(SUM, options=EngineOptions(compute_dtype=torch.float64)),
        signed(SUM, options=EngineOptions(on_missing="base")),
        signed(SUM, dtype="BF16"),
        signed(add_difference_ties("a", "b", alpha=0.3, k=0.2)),
        signed(weighted_sum("a", "b", alpha={"conv": 0.3, "default": 0.4})),
    ],
)
def test_whatever_changes_the_bytes_changes_the_signature(other):
    assert other.digest != signed(SUM).digest


def test_paths_threads_and_tiles_do_not():
    moved = weighted_sum("elsewhere/a", "elsewhere/b", alpha=0.3)
    options = EngineOptions(workers=7, tile_size=4096, memory_budget=10**9, fuse="never")

    assert signed(moved, options=options).digest == signed(SUM).digest


def test_the_code_of_every_method_that_a_composite_is_made_of_counts():
    methods = signed(add_difference_ties("a", "b", "c", alpha=0.3, k=0.2), "abc").methods

    assert {"add_difference_ties", "kth_magnitude"} <= set(methods)


def test_the_code_that_any_key_needs_counts():
    methods = signed(
        add_difference_ties("a", "b", "c", k={"conv": 1.0, "fc": 0.2, "default": 1}), "abc"
    ).methods

    assert {"elect_and_average", "kth_magnitude"} <= set(methods)


def test_a_model_in_memory_has_no_signature():
    with pytest.raises(RecipeError, match="save the model to a file first"):
        signed(weighted_sum(model({"w": torch.ones(2)}), "b", alpha=0.3))


def test_a_file_is_read_once_until_it_changes(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"one")
    read: list[int] = []

    first = content_of(path, read.append)
    again = content_of(path, read.append)
    assert (first == again, read) == (True, [3])
    assert unread_bytes([path]) == 0

    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert unread_bytes([path]) == 3
    assert content_of(path) != first


def test_the_contents_of_many_files(tmp_path: Path):
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.write_text(path.name)

    assert contents_of([*paths, paths[0]]) == {path: content_of(path) for path in paths}
    assert size_of(paths[0]) == 3
    with pytest.raises(CheckpointError, match="none cannot be read: No such file or directory"):
        contents_of([*paths, tmp_path / "none"])


def test_the_content_of_a_folder_is_that_of_its_files(tmp_path: Path):
    for folder, value in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
        (tmp_path / folder).mkdir()
        save_file({"w": torch.full((3,), value)}, tmp_path / folder / "model.safetensors")

    one, same, other = (content_of(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other


def test_hashes_are_cached_for_other_processes(hash_cache: Path, tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("first")
    content_of(path)
    content_hash._hashes.clear()  # as another process has it

    assert unread_bytes([path]) == 0
    path.write_text("another")
    assert unread_bytes([path]) == 7


def test_a_file_that_changes_has_one_row_and_old_rows_go(
    hash_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("old", "new", "new"):
        (tmp_path / name).write_text(name + str(os.urandom(4)))
        content_of(tmp_path / name)
    assert _rows(hash_cache) == [str(tmp_path / "new"), str(tmp_path / "old")]
    later = time.time() + 365 * 86400
    monkeypatch.setattr(content_hash.time, "time", lambda: later)
    (tmp_path / "last").write_text("last")
    content_of(tmp_path / "last")

    assert _rows(hash_cache) == [str(tmp_path / "last")]


def test_a_damaged_cache_is_made_anew(hash_cache: Path, tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("content")
    hash_cache.write_bytes(b"no database " * 1000)

    first = content_of(path)
    content_hash._hashes.clear()
    assert content_of(path) == first
    assert _rows(hash_cache) == [str(path)]


def test_a_cache_that_cannot_be_written_does_no_harm(hash_cache: Path, tmp_path: Path):
    hash_cache.mkdir()  # a folder has the name of the file
    path = tmp_path / "file"
    path.write_text("content")

    assert content_of(path) == hashlib.sha256(b"content").hexdigest()


@pytest.fixture
def hash_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the cache, which is empty."""
    monkeypatch.setattr(content_hash, "_hashes", {})
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "contents.sqlite"


def _rows(cache: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(cache)) as database:
        return [os.fsdecode(path) for (path,) in database.execute("SELECT path FROM hashes ORDER BY path")]


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        content_of(tmp_path / "none.safetensors")


def test_a_method_that_was_typed_at_a_prompt_is_told_by_what_it_does():
    def typed(body: str) -> str:
        scope: dict[str, object] = {}
        text = f"""
from torch import Tensor
from mecha_exp import Parameter, Return, merge_method

@merge_method(register=False)
class twice:
    def __call__(self, a: Parameter(Tensor)) -> Return(Tensor):
        return {body}
"""
        exec(text, scope)
        return code_hashes(scope["twice"]("a"))["twice"]

    assert typed("a * 2") == typed("a * 2")
    assert len({typed("a * 2"), typed("a * 3"), typed("a + 2"), typed("a.abs()"), typed("a.neg()")}) == 5


METHOD = """
from torch import Tensor
from mecha_exp import Parameter, Return, merge_method
from factors import two

@merge_method(register=False)
def doubled(a: Parameter(Tensor)) -> Return(Tensor):
    return a * two()
"""


def test_the_files_that_a_method_imports_from_its_folder_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def code_in(folder: str, constant: str = "2", unused: str = "1", comment: str = "") -> str:
        place = tmp_path / folder
        place.mkdir()
        (place / "doubled.py").write_text(METHOD)
        (place / "factors.py").write_text(
            f"from numbers_here import number\n\ndef two():\n    return number {comment}\n"
        )
        (place / "numbers_here.py").write_text(f"import factors\nnumber = {constant}\n")
        (place / "unused.py").write_text(f"number = {unused}\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(place)
            for name in ("doubled", "factors", "numbers_here"):
                patch.delitem(sys.modules, name, raising=False)
            method = importlib.import_module("doubled").doubled
            for name in ("doubled", "factors", "numbers_here"):
                patch.delitem(sys.modules, name, raising=False)
        return code_hashes(method("a"))["doubled"]

    first = code_in("first")

    assert code_in("same") == code_in("beside", unused="7") == code_in("told", comment="# indeed") == first
    assert code_in("other", constant="3") != first

"""Recipes and merges in files, by the names that older scripts use."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mecha_exp import (
    ConfigError,
    RecipeError,
    RecipeMerger,
    deserialize_path,
    merge,
    merge_and_save,
    model,
    n_average,
    serialize,
    serialize_and_save,
    weighted_sum,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models in a folder `models` below the current one."""
    (tmp_path / "models").mkdir()
    for name, value in (("a", 0.0), ("b", 1.0)):
        save_file({"w": torch.full((2,), value)}, tmp_path / "models" / f"{name}.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_merger_looks_for_models_and_puts_its_output_in_its_folder(folder):
    merger = RecipeMerger(models_dir="models")

    path = merger.merge_and_save(weighted_sum("a", "b", alpha=0.25), output="mix-v1.5")

    assert path == Path("models/mix-v1.5.safetensors")
    assert load_file(path)["w"].tolist() == [0.25, 0.25]


def test_a_merger_takes_several_folders_and_another_dtype(folder):
    merger = RecipeMerger(models_dir=[folder, folder / "models"])

    path = merger.merge_and_save(n_average("a", "b.safetensors"), save_dtype=torch.bfloat16)

    assert path == folder / "merge.safetensors"
    assert load_file(path)["w"].dtype is torch.bfloat16


def test_a_merger_takes_the_keywords_of_older_scripts(folder):
    merger = RecipeMerger(models_dir="models", default_device="cpu", default_dtype=torch.float64)
    made = {}

    merger.merge_and_save(
        model({"v": torch.ones(2)}),
        output=made,
        fallback_model="b",
        save_device="cpu",
        save_dtype=torch.float16,
        threads=1,
        total_buffer_size=2**20,
    )

    assert {key: tensor.dtype for key, tensor in made.items()} == {"v": torch.float16, "w": torch.float16}
    with pytest.raises(ConfigError, match="device: expected 'cpu', 'cuda'"):
        RecipeMerger(default_device="tpu").merge_and_save("a")
    with pytest.raises(RecipeError, match="gives a delta, not a weight"):
        merger.merge_and_save(model("a") - model("b"))


def test_merge_and_save_is_a_merger_at_once(folder):
    path = merge_and_save("models/a", "copy.safetensors")

    assert load_file(path)["w"].tolist() == [0.0, 0.0]


def test_a_recipe_is_saved_and_read(folder):
    recipe = weighted_sum("a", "b ä=\n.safetensors", alpha=0.25)

    path = serialize_and_save(recipe, folder / "mine-v1.5")

    assert path == folder / "mine-v1.5.mecha"
    assert path.read_text(encoding="utf-8") == serialize(recipe), "without a line end, for sd-mecha"
    assert deserialize_path(path) is recipe


def test_the_recipe_of_a_merged_model_is_read_from_its_header(folder):
    recipe = n_average("models/a", "models/b")
    merge(recipe, "merged.safetensors")

    assert deserialize_path("merged.safetensors") is recipe


def test_a_model_in_memory_leaves_no_recipe(folder):
    merge(n_average({"w": torch.ones(2)}), "merged.safetensors")

    with pytest.raises(RecipeError, match=r"merged\.safetensors carries no recipe: .* from models in memory"):
        deserialize_path("merged.safetensors")


def test_a_file_that_cannot_be_read_or_written_is_named(folder):
    with pytest.raises(RecipeError, match=r"the recipe 'no\.mecha' does not exist\. Looked in "):
        deserialize_path("no.mecha")
    with pytest.raises(RecipeError, match=r"x\.mecha cannot be written: No such file or directory"):
        serialize_and_save(n_average("a"), folder / "nowhere" / "x.mecha")


def test_an_error_in_a_text_names_the_file_too(folder):
    Path("bad.mecha").write_text("version 0.1.0\noops")

    with pytest.raises(RecipeError, match=r"^bad\.mecha: line 2, column 1: unknown command 'oops'"):
        deserialize_path("bad.mecha")

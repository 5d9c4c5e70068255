"""Recipe texts of sd-mecha are read, and mean what it makes of them; it reads ours, and they mean the same.

`make parity` writes the texts and what sd-mecha makes of them anew, and runs these tests.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mecha_exp as m
from parity.inputs import plain_inputs
from parity.our_texts import ODD, A, B, C, recipes

TEXTS = Path(__file__).parents[1] / "tests" / "golden" / "texts"
MERGED = load_file(TEXTS / "merged.safetensors")
OPTIONS = m.EngineOptions(compute_dtype=torch.float64)

SAME = (
    "weighted_sum",
    "weighted_sum_by_key",
    "diamond",
    "ties",
    "train_difference",
    "delta_file",
    "fallback",
)
"""What both of us write of the same recipe reads back as one and the same graph."""

OTHERS = {
    "add_difference": m.add_difference(A, B, C, alpha=0.5),
    "model_stock": m.n_model_stock(A, B, C),
    "perpendicular": m.add_difference(
        A, m.perpendicular_component(m.subtract(A, C), m.subtract(B, C)), alpha=0.8
    ),
    "a_path_with_quotes": m.weighted_sum(ODD, B, alpha=0.5),
    "cast": m.weighted_sum(A, B),
    "geometric_median": m.geometric_median(A, B, C, maxiter=5),
    "clamp": m.clamp(A, B, C, stiffness=0.5),
    "dropout": m.dropout(A, B, C, probability=0.0, alpha=0.7, seed=None),
    "copy_region": m.tensor_sum(A, B, C, width=0.4, offset=0.25),
    "truncate_rank": m.add_difference(
        A, m.truncate_rank(m.subtract(B, A), rank=2, use_approximate_basis=False)
    ),
}
"""What sd-mecha writes in other words, or with other numbers, gives the same model."""


def text(kind: str, name: str) -> str:
    return (TEXTS / kind / f"{name}.mecha").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of the texts, in a folder."""
    folder = tmp_path_factory.mktemp("models")
    for name, tensors in zip(
        ("a.safetensors", "b.safetensors", "c.safetensors", ODD), plain_inputs(), strict=True
    ):
        save_file(tensors, folder / name)
    return folder


@pytest.fixture
def made(models: Path, monkeypatch: pytest.MonkeyPatch):
    """Merges a recipe in float64."""
    monkeypatch.chdir(models)
    return lambda recipe: m.merge(recipe, options=OPTIONS, dtype=torch.float64)


def assert_same(result: dict[str, torch.Tensor], name: str) -> None:
    for key, tensor in result.items():
        torch.testing.assert_close(tensor, MERGED[f"{name}|{key}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted({*SAME, *OTHERS}))
@pytest.mark.parametrize("solved", ["", "_solved"])
def test_a_text_of_sd_mecha_gives_the_model_that_it_gives_there(made, name, solved):
    assert_same(made(m.deserialize(text("theirs", name + solved))), f"theirs/{name}{solved}")


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("solved", ["", "_solved"])
def test_a_text_of_sd_mecha_is_the_recipe_that_we_would_write(name, solved):
    assert m.deserialize(text("theirs", name + solved)) is recipes()[name]


@pytest.mark.parametrize("solved", ["", "_solved"])
def test_a_text_with_a_seed_that_is_null_is_read(made, solved):
    """Its numbers are others, as `apply_stock` is the wrong way round there: see docs/recipe-format.md."""
    recipe = m.deserialize(text("theirs", f"dare{solved}"))

    assert "seed" not in m.serialize(recipe)
    assert made(recipe).keys() == made(A).keys()


@pytest.mark.parametrize("name", OTHERS)
def test_a_method_that_sd_mecha_writes_as_its_parts_is_the_same_model(made, name):
    assert_same(made(OTHERS[name]), f"theirs/{name}")


@pytest.mark.parametrize("name", recipes())
def test_sd_mecha_reads_what_we_write_and_makes_the_same_model(made, name):
    assert m.serialize(recipes()[name]) == text("ours", name), "sd-mecha has read this very text"
    assert_same(made(recipes()[name]), f"ours/{name}")

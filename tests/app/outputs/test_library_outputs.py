"""A file that the library merged says how, so that the application makes it again, with whatever options."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mecha_exp
from mecha_exp import merge, model, weighted_sum
from mecha_exp.plugins import load_plugins

A = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0])}
B = {"x": torch.tensor([5.0, 6.0]), "y": torch.tensor([7.0])}


def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, f"{name}.safetensors")


def _bytes(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"output_dtype": torch.bfloat16},
        {"output_dtype": {"x": "float16"}},
        {"merge_dtype": torch.float64},
        {"strict_mandatory_keys": False},
        {"fallback_model": "c.safetensors"},
        {"omit_non_finite_inputs": True, "fallback_model": "c.safetensors"},
        {"options": mecha_exp.EngineOptions(on_missing="base", on_nonfinite="keep")},
    ],
    ids=lambda words: " ".join(words) or "defaults",
)
def test_a_merged_file_is_made_again_from_itself_alone(words, folder, app):
    spoilt = {**B, "y": torch.tensor([torch.nan])} if "omit_non_finite_inputs" in words else B
    part = {"x": A["x"]} if {"strict_mandatory_keys", "options"} & words.keys() else A
    for name, tensors in {"a": part, "b": spoilt, "c": A}.items():
        save(name, tensors)
    merged = merge(weighted_sum("a.safetensors", "b.safetensors", alpha=0.3), "merged.safetensors", **words)

    again = app("merge", "merged.safetensors", "-o", "again.safetensors")
    reproduced = app("reproduce", "merged.safetensors")

    assert again.status == 0, again.err
    assert _bytes(folder / "again.safetensors") == _bytes(merged)
    assert (reproduced.status, "identical" in reproduced.out) == (0, True), reproduced.out


def test_what_several_jobs_make_says_how_too(folder, app):
    save("a", A)
    recipe = weighted_sum("a.safetensors", model("a.safetensors"), alpha=0.3)
    mecha_exp.merge_many([mecha_exp.Job(recipe, folder / f"{n}.safetensors", torch.float16) for n in (1, 2)])

    assert _bytes(folder / "1.safetensors") == _bytes(folder / "2.safetensors")
    assert app("reproduce", "2.safetensors").status == 0


def test_the_text_alone_gives_the_same_file(folder, app):
    save("a", A)
    save("b", B)
    merged = merge(weighted_sum("a.safetensors", "b.safetensors", alpha=0.3), "merged.safetensors")
    app("compose", "merged.safetensors", "-o", "recipe.mecha")

    app("merge", "recipe.mecha", "-o", "again.safetensors")

    assert _bytes(folder / "again.safetensors") == _bytes(merged)
    assert _bytes(merge(mecha_exp.deserialize_path("recipe.mecha"), "third.safetensors")) == _bytes(merged)


def test_a_folder_says_it_too(folder, app):
    save("a", A)
    merge(
        weighted_sum("a.safetensors", model("a.safetensors"), alpha=0.3), "merged", output_dtype=torch.float16
    )

    assert app("merge", "merged", "-o", "again").status == 0
    for file in sorted((folder / "merged").iterdir()):
        assert _bytes(folder / "again" / file.name) == _bytes(file)


@pytest.mark.heavy
def test_a_model_of_a_method_of_ones_own_is_made_again_with_its_plugin(folder, as_a_user):
    save("a", A)
    Path("mine.py").write_text(
        "from torch import Tensor\nfrom mecha_exp import Parameter, Return, merge_method\n\n\n"
        "@merge_method\ndef keyword_negate(a: Parameter(Tensor)) -> Return(Tensor):\n    return -a\n"
    )
    load_plugins(["mine.py"])
    merge(mecha_exp.keyword_negate("a.safetensors"), "negated.safetensors")

    without = as_a_user("reproduce", "negated.safetensors", cwd=folder)
    outcome = as_a_user("reproduce", "negated.safetensors", "--plugin", "mine.py", cwd=folder)

    assert "unknown merge method 'keyword_negate'" in without.err
    assert (outcome.status, "identical" in outcome.out) == (0, True), outcome.out + outcome.err

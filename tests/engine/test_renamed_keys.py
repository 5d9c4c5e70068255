"""A model is read under other keys, in place."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mecha_exp import (
    CheckpointError,
    MechaError,
    RecipeError,
    deserialize,
    merge,
    serialize,
    slerp,
    weighted_sum,
)
from mecha_exp.method_api.registry import resolve_method

rename_keys, take_rows = resolve_method("rename_keys"), resolve_method("take_rows")
take_layers = resolve_method("take_layers")


def tensors() -> dict[str, torch.Tensor]:
    names = ("embed_tokens.weight", "layers.0.up.weight", "layers.1.up.weight", "layers.1.norm", "norm")
    return {name: torch.full((3, 2), float(number)) for number, name in enumerate(names)}


def test_the_first_rule_that_is_about_a_key_names_it():
    made = merge(rename_keys(tensors(), "layers.*.norm ->, layers.*.up.* -> deep.*.e.0.*, * -> *"))

    a = tensors()
    assert made.keys() == {"embed_tokens.weight", "deep.0.e.0.weight", "deep.1.e.0.weight", "norm"}
    assert torch.equal(made["deep.1.e.0.weight"], a["layers.1.up.weight"])


def test_keys_of_no_rule_are_left_out_and_files_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    save_file(tensors(), "a.safetensors")
    recipe = rename_keys("a.safetensors", "layers.*.up.weight -> layers.*.down.weight") | rename_keys(
        "a.safetensors", "norm -> last"
    )

    merge(recipe, "made.safetensors")

    made = load_file("made.safetensors")
    assert made.keys() == {"layers.0.down.weight", "layers.1.down.weight", "last"}
    assert torch.equal(made["last"], tensors()["norm"])
    assert deserialize(serialize(recipe)) is recipe


def test_views_of_views_are_not_mistaken_for_each_other():
    a = tensors()
    rows = take_rows(a, rows="2 1 0")
    moved = rename_keys(rows, "embed_tokens.weight -> embed_tokens.weight")
    plain = rename_keys(a, "embed_tokens.weight -> embed_tokens.weight, norm -> norm")
    a["embed_tokens.weight"] = torch.arange(6.0).view(3, 2)

    made = merge(moved | plain)
    both = merge(take_layers(take_rows(a, rows="2 1 0"), 0, 1, rest="all") | take_layers(a, 0, 1, rest="all"))

    assert made.keys() == {"embed_tokens.weight", "norm"}
    assert torch.equal(both["embed_tokens.weight"], a["embed_tokens.weight"].flip(0))


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ("layers", RecipeError, "rules: expected OLD -> NEW, got 'layers'."),
        ("-> a", RecipeError, "rules: expected OLD -> NEW, got '-> a'."),
        ("*.*.* -> *.*", RecipeError, "rules: '*.*.* -> *.*' has 3 and 2 stars."),
        ("layers.*.norm -> norm", RecipeError, "has 1 and 0 stars. The text of each star on the left goes"),
        ("blocks.* -> layers.*", CheckpointError, "has no keys for blocks.*. It has embed_tokens.weight"),
        ("norm -> a, layers.1.norm -> a", CheckpointError, "would both be 'a'."),
    ],
)
def test_rules_that_cannot_be_applied_are_refused(rules: str, error: type[MechaError], message: str):
    with pytest.raises(error) as raised:
        merge(rename_keys(tensors(), rules))
    assert message in str(raised.value)


def test_values_by_key_are_by_the_new_names():
    rules = "layers.0.up.weight -> first, layers.1.up.weight -> second"
    models = [{key: tensor + more for key, tensor in tensors().items()} for more in (0, 1)]
    a, b = (rename_keys(each, rules) for each in models)

    made = merge(weighted_sum(a, b, alpha={"first": 0.0, "second": 1.0}))

    assert [made[key][0, 0].item() for key in ("first", "second")] == [1, 3]


def test_a_merge_is_refused():
    with pytest.raises(RecipeError, match=r"rename_keys: a is slerp\(a, b\), a merge"):
        merge(rename_keys(slerp(tensors(), tensors()), "* -> *"))

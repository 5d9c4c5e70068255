"""Layers of models are taken and stacked in place: renumbered, with the config.json of the new depth."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mecha_exp import (
    CheckpointError,
    Job,
    RecipeError,
    deserialize,
    merge,
    model,
    plan,
    serialize,
    slerp,
    stack_layers,
    subtract,
    weighted_sum,
)
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.sources.layers import Layers, Span, renamed_keys

take_layers = resolve_method("take_layers")
LAYERS = 4


def llama(value: float, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """A model whose entries tell the model and the layer: value + layer / 10."""
    outside = {
        "model.embed_tokens.weight": value + 100,
        "model.norm.weight": value + 200,
        "lm_head.weight": value,
    }
    inside = {f"model.layers.{n}.mlp.up_proj.weight": value + n / 10 for n in range(layers)}
    return {key: torch.full((2, 3), float(number)) for key, number in {**outside, **inside}.items()}


def numbers(merged: dict[str, torch.Tensor]) -> list[float]:
    """The entries of the layers, in order."""
    found = {int(key.split(".")[2]): tensor for key, tensor in merged.items() if ".layers." in key}
    assert sorted(found) == list(range(len(found)))
    return [round(found[n][0, 0].item(), 3) for n in range(len(found))]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value, kind in (("a", 1.0, "full"), ("b", 2.0, "sliding")):
        (tmp_path / name).mkdir()
        save_file(llama(value), tmp_path / name / "model.safetensors")
        config = {
            "num_hidden_layers": LAYERS,
            "layer_types": [f"{kind} {n}" for n in range(LAYERS)],
            "rope_scaling": [1, 2],
        }
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_layers_are_stacked_and_renumbered():
    a, b = llama(1), llama(2)

    merged = merge(stack_layers((a, 0, 3), (b, 1, 4), (a, 3, 4), (b, 0, 1)))

    assert numbers(merged) == [1.0, 1.1, 1.2, 2.1, 2.2, 2.3, 1.3, 2.0]
    outside = [
        merged[key][0, 0].item()
        for key in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    ]
    assert outside == [101, 202, 2]


def test_a_folder_of_stacked_layers_has_a_config_of_the_new_depth(folders: Path):
    merge(stack_layers(("a", 0, 3), ("b", 2, 4), ("a", 1, 4), ("a", 0, 4)), folders / "merged")

    config = json.loads((folders / "merged" / "config.json").read_text())
    assert config["num_hidden_layers"] == 12
    assert config["layer_types"] == [
        *("full 0", "full 1", "full 2", "sliding 2", "sliding 3", "full 1", "full 2", "full 3"),
        *("full 0", "full 1", "full 2", "full 3"),
    ]
    assert config["rope_scaling"] == [1, 2]
    assert numbers(load_file(folders / "merged" / "model.safetensors"))[3] == 2.2


def test_layers_of_models_whose_rows_are_taken_have_a_config_of_the_new_depth(folders: Path):
    a, b = (resolve_method("take_rows")(name, rows="1 0") for name in ("a", "b"))

    merge(stack_layers((a, 0, 4), (b, 2, 4)), folders / "merged")

    config = json.loads((folders / "merged" / "config.json").read_text())
    assert config["num_hidden_layers"] == 6
    assert config["layer_types"][3:] == ["full 3", "sliding 2", "sliding 3"]


def test_layers_are_copied_in_their_bytes_and_not_held(folders: Path):
    with plan([Job(stack_layers(("a", 0, 4), ("b", 0, 4)), {})]) as planned:
        assert planned.whole_bytes == 0
        assert planned.bytes_written == planned.bytes_read
    dropped = {key: tensor.bfloat16() for key, tensor in llama(1.37).items()}
    merged = merge(stack_layers((dropped, 1, 3)))
    assert torch.equal(
        merged["model.layers.0.mlp.up_proj.weight"], dropped["model.layers.1.mlp.up_proj.weight"]
    )


def test_layers_are_merged_with_values_by_their_new_numbers():
    a, b = llama(1), llama(2)
    upper = weighted_sum(
        take_layers(a, first=2, end=4, at=2, rest="after"),
        take_layers(b, first=0, end=2, at=2, rest="after"),
        alpha={"model.layers.3.*": 1.0, "model.layers.2.*": 0.5, "default": 0.0},
    )

    merged = merge(take_layers(a, first=0, end=2, rest="before") | upper)

    assert numbers(merged) == [1.0, 1.1, 1.6, 2.1]
    assert merged["lm_head.weight"][0, 0] == 1


def test_differences_have_layers_too():
    a, b = llama(1), llama(3)
    delta = model(merge(subtract(b, a)), "delta")

    merged = merge(take_layers(a, first=1, end=2) + take_layers(delta, first=1, end=2))

    assert numbers(merged) == [3.1]


def test_a_recipe_with_layers_is_written_and_read(folders: Path):
    recipe = stack_layers(("a", 0, 3), ("b", 1, 4))

    assert deserialize(serialize(recipe)) is recipe
    one, two = merge(recipe, "one.safetensors"), merge(recipe, "two.safetensors")
    assert Path(one).read_bytes() == Path(two).read_bytes()


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=6)
)
def test_any_slices_are_stacked_without_a_gap(slices):
    slices = [(name, min(first, end - 1), end) for name, first, end in slices]
    layers = Layers("h.", LAYERS)
    keys = [f"h.{n}.{part}.w" for n in range(LAYERS) for part in ("attn", "mlp")]
    at, made = 0, {}
    for name, first, end in slices:
        renamed = renamed_keys(keys, layers, Span(first, end, at), name)
        assert not renamed.keys() & made.keys()
        made |= {key: (name, original) for key, original in renamed.items()}
        at += end - first

    expected = [(name, n) for name, first, end in slices for n in range(first, end)]
    assert [made[f"h.{n}.mlp.w"] for n in range(at)] == [(name, f"h.{n}.mlp.w") for name, n in expected]


@pytest.mark.parametrize(
    ("slices", "error", "message"),
    [
        (
            [],
            RecipeError,
            "stack_layers: expected slices as (model, first layer, the one after the last), got None",
        ),
        ([("a", 1)], RecipeError, "got ('a', 1)."),
        ([("a", 2, 2)], RecipeError, "got ('a', 2, 2)."),
        ([("a", 0, 5)], CheckpointError, "a: layers 0 to 4 are asked for, and it has 4, numbered from 0."),
        (
            [(slerp("a", "b"), 0, 2)],
            RecipeError,
            "take_layers: a is slerp(a, b), a merge, and it reads models where they are stored",
        ),
    ],
)
def test_what_cannot_be_stacked_is_refused(slices, error, message: str, folders: Path):
    with pytest.raises(error) as raised:
        merge(stack_layers(*slices), folders / "merged")

    assert message in str(raised.value)
    assert not (folders / "merged").exists()


def test_keys_on_no_known_side_of_the_layers_are_of_one_model_only():
    a, b = ({**llama(value), "rotary.inv": torch.full((2,), value)} for value in (1.0, 2.0))

    with pytest.raises(
        CheckpointError, match=r"the names of rotary\.inv do not tell whether they come before"
    ):
        merge(stack_layers((a, 0, 2), (b, 0, 2)))
    assert merge(stack_layers((a, 0, 2), (b, 0, 2), (a, 1, 2))).keys() >= {"rotary.inv", "lm_head.weight"}

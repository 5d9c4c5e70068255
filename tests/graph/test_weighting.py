"""Hyperparameters with a value for each key: by component, block or pattern, or along the depth."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mecha_exp import merge, weighted_sum
from mecha_exp.architectures import resolve
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.engine.planner.by_key import effective_values_of
from mecha_exp.errors import RecipeError
from mecha_exp.graph.by_key import BlockValue, ByKey, NoValueError, by_key, effective_values
from mecha_exp.graph.curves import Gradient, Preset
from mecha_exp.graph.literals import literal
from mecha_exp.recipe import build_recipe, deserialize, serialize

LAYERS = 5


def anatomy(*keys: str) -> Anatomy:
    return Anatomy.of({key: torch.empty(2) for key in keys})


NETWORK = anatomy("conv1.weight", "conv1.bias", "conv10.weight", "conv2.weight", "conv2.bias", "fc.weight")
LANGUAGE_MODEL = anatomy(
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(f"model.layers.{i}.{name}.weight" for i in range(LAYERS) for name in ("attn", "mlp")),
)


def values(anatomy: Anatomy, mapping) -> dict[str, float]:
    bound = by_key(mapping).with_curves().over(anatomy)
    return {key: bound(key) for key in anatomy.keys}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("conv1.weight", 0.3),  # conv1 lies inside conv*
        ("conv10.weight", 0.1),  # conv1 is not its beginning
        ("conv2.weight", 0.1),
        ("conv2.bias", 0.2),  # conv*.bias lies inside conv*
        ("conv1.bias", 0.2),  # crosses the block conv1: keys win over blocks
        ("fc.weight", 0.9),
    ],
)
def test_of_several_selectors_the_most_specific_one_decides(key, expected):
    assert values(NETWORK, {"conv*": 0.1, "conv1": 0.3, "conv*.bias": 0.2, "default": 0.9})[key] == expected


@pytest.mark.parametrize(
    ("selector", "held"),
    [
        ("3", {"model.layers.3.attn.weight", "model.layers.3.mlp.weight"}),  # a block
        ("model.layers.3", {"model.layers.3.attn.weight", "model.layers.3.mlp.weight"}),  # a beginning
        ("lm_head", {"lm_head.weight"}),  # a component
        ("model.norm.weight", {"model.norm.weight"}),  # a key
        ("*.3.attn.*", {"model.layers.3.attn.weight"}),  # a pattern of keys
        (
            "[12]",
            {f"model.layers.{i}.{name}.weight" for i in (1, 2) for name in ("attn", "mlp")},
        ),  # of blocks
        ("lm_*d", {"lm_head.weight"}),
        (r"re:layers\.[34]\.attn", {"model.layers.3.attn.weight", "model.layers.4.attn.weight"}),
    ],
)
def test_a_selector_is_a_component_a_block_a_key_or_a_pattern(selector, held):
    found = values(LANGUAGE_MODEL, {selector: 1, "default": 0})

    assert {key for key, value in found.items() if value == 1} == held


def test_selectors_that_cross_and_disagree_are_an_error():
    with pytest.raises(RecipeError) as error:
        values(NETWORK, {"*.weight": 0.1, "conv1.*": 0.2, "default": 0})

    assert "the key 'conv1.weight' is held by '*.weight' = 0.1, 'conv1.*' = 0.2" in str(error.value)
    assert "neither lies inside the other" in str(error.value)


def test_selectors_that_cross_and_agree_are_none():
    assert values(NETWORK, {"*.weight": 0.1, "conv1.*": 0.1, "default": 0})["conv1.weight"] == 0.1


def test_the_error_is_mended_by_a_selector_for_what_they_share():
    mended = {"*.weight": 0.1, "conv1.*": 0.2, "conv1.weight": 0.3, "default": 0}

    assert values(NETWORK, mended)["conv1.weight"] == 0.3


def test_a_key_without_a_value_is_an_error_that_offers_a_default():
    with pytest.raises(NoValueError, match=r"holds the key 'conv10.weight'.*Add a 'default'"):
        values(NETWORK, {"conv1": 0.3})


def test_selectors_that_match_nothing_are_named_with_the_nearest_block():
    bound = by_key({"conv1": 1, "fc?.bias": 2, "covn2": 3, "default": 0}).over(NETWORK)

    glob, misspelt = sorted(bound.unmatched(NETWORK.keys), reverse=True)

    assert glob.startswith("the pattern 'fc?.bias' matches none of the 6 keys")
    assert "no block and no component. Did you mean 'conv2'" in misspelt


def test_a_regular_expression_that_is_none_is_an_error():
    with pytest.raises(RecipeError, match=r"'re:\(' is not a regular expression"):
        values(NETWORK, {"re:(": 1, "default": 0})


def test_blocks_stand_beside_a_default():
    assert by_key({"blocks": {"conv1": 0.3}, "default": 0.5}) == ByKey((("conv1", 0.3),), 0.5)
    assert by_key({"blocks": {"conv1": 0.3, "default": 0.1}, "default": 0.5}).default == 0.1
    assert by_key({"blocks": None, "default": 0.5}) == by_key({"default": 0.5}) == 0.5
    assert by_key({"blocks": 0.3}).patterns == (("blocks", 0.3),)  # a layer may be called so


def test_a_gradient_runs_over_the_layers_with_both_ends_included():
    found = values(LANGUAGE_MODEL, {"default": [0.0, 0.5, 1.0], "lm_head": 0.7})

    assert [found[f"model.layers.{i}.mlp.weight"] for i in range(LAYERS)] == [0, 0.25, 0.5, 0.75, 1]
    assert found["model.embed_tokens.weight"] == 0, "before the layers"
    assert found["model.norm.weight"] == 1, "after them"
    assert found["lm_head.weight"] == 0.7


def test_a_gradient_may_hold_for_some_keys():
    found = values(LANGUAGE_MODEL, {"*.attn.*": [0, 1], "default": 0.3})

    assert found["model.layers.4.attn.weight"] == 1
    assert found["model.layers.4.mlp.weight"] == 0.3


def test_each_stack_of_layers_has_a_depth_of_its_own():
    stacks = anatomy(
        *(f"{part}.{i}.w" for part, n in (("encoder", 3), ("decoder", 2)) for i in range(n)), "x.w"
    )

    found = values(stacks, {"default": [0, 1], "x": 9})

    assert [found[f"encoder.{i}.w"] for i in range(3)] == [0, 0.5, 1]
    assert [found[f"decoder.{i}.w"] for i in range(2)] == [0, 1]
    with pytest.raises(NoValueError, match=r"'x\.w' lies in no layer.*and a 'default'"):
        values(stacks, {"default": [0, 1], "encoder": 1})


def test_a_preset_stands_for_every_layer_and_single_blocks_over_it():
    found = values(LANGUAGE_MODEL, {"default": 0.5, "blocks": {"preset": "GRAD_V", "3": 0.9}})

    assert [found[f"model.layers.{i}.mlp.weight"] for i in range(LAYERS)] == [1, 0.5, 0, 0.9, 1]
    assert found["model.embed_tokens.weight"] == 0, "as BASE in the published lists"


def test_a_misspelt_preset_is_an_error_with_the_nearest():
    with pytest.raises(RecipeError, match=r"unknown preset of blocks 'GRAD_W'\. Did you mean .*'GRAD_V'"):
        by_key({"blocks": {"preset": "GRAD_W"}})
    with pytest.raises(RecipeError, match=r"alpha: unknown preset of blocks 'WARP12'.*'WRAP12'"):
        weighted_sum("a.safetensors", "b.safetensors", alpha="WARP12")


def test_a_word_that_is_far_from_any_preset_is_no_number():
    with pytest.raises(RecipeError, match="alpha: expected a number, got 'abc'"):
        weighted_sum("a.safetensors", "b.safetensors", alpha="abc")


def test_a_list_is_a_gradient_only_where_one_number_is_expected():
    recipe = weighted_sum("a.safetensors", "b.safetensors", alpha=[0, 1])

    assert dict(recipe.arguments)["alpha"].value == ByKey((), Gradient((0.0, 1.0)))


def test_values_beyond_the_bounds_of_the_argument_are_found_in_gradients_too():
    with pytest.raises(RecipeError, match=r"k: 1\.5 is out of range"):
        build_recipe({"method": "add_difference_ties", "base": "a", "models": ["b"], "k": [0.1, 1.5]})


@pytest.mark.parametrize(
    "alpha",
    [
        [0.0, 0.5, 1.0],
        "GRAD_V",
        {"conv1": [0.0, 1.0], "fc*": "SMOOTHSTEP*2", "re:a b$": 0.3, "default": 0.5},
        {"blocks": {"preset": "R_SMOOTHSTEP/3", "convention": "supermerger", "IN04": 0.1}},
    ],
)
def test_the_text_of_a_recipe_says_it_all(alpha):
    recipe = weighted_sum("a.safetensors", "b.safetensors", alpha=alpha)

    assert deserialize(serialize(recipe)) is recipe


def test_a_merge_weighs_each_key_by_its_value():
    keys = LANGUAGE_MODEL.keys
    zeros, ones = ({key: torch.full((3,), value) for key in keys} for value in (0.0, 1.0))

    merged = merge(weighted_sum(zeros, ones, alpha={"default": [0, 0.5, 1], "[12]": 0.9, "lm_head": 0.7}))

    expected = values(LANGUAGE_MODEL, {"default": [0, 0.5, 1], "[12]": 0.9, "lm_head": 0.7})
    assert {key: tensor[0].item() for key, tensor in merged.items()} == pytest.approx(expected)


def test_the_effective_values_are_listed_by_block():
    bound = by_key({"default": 0.5, "*.attn.*": 0.1, "0": 0.2, "lm_head": 1}).over(LANGUAGE_MODEL)

    listed = {value.block: value for value in effective_values(bound)}

    assert listed["0"] == BlockValue("model", "0", 2, (0.1, 0.2))
    assert listed["3"].values == (0.1, 0.5)
    assert listed["lm_head"] == BlockValue("lm_head", "lm_head", 1, (1,))


def test_each_argument_of_a_recipe_has_its_own_effective_values():
    alpha = literal(by_key({"conv1": 1, "default": 0}).over(NETWORK))
    other = literal(by_key({"conv1": 2, "default": 0}).over(NETWORK))
    inner = weighted_sum("a.safetensors", "b.safetensors", alpha=alpha)

    found = effective_values_of(weighted_sum(inner, "c.safetensors", alpha=other))

    assert list(found) == ["weighted_sum.alpha", "weighted_sum.alpha (2)"]


def test_the_convention_decides_where_disputed_layers_belong():
    with pytest.raises(Exception, match="has no block convention 'supermreger'"):
        Anatomy.of({"a.0.w": torch.empty(1)}, "supermreger")


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6), st.integers(1, 40))
def test_a_gradient_stays_between_its_points(points, count):
    gradient = Gradient(tuple(points))

    sampled = [gradient.at(i, count) for i in range(count)]

    assert sampled[0] == points[0]
    assert count == 1 or sampled[-1] == pytest.approx(points[-1])
    assert all(min(points) - 1e-9 <= value <= max(points) + 1e-9 for value in sampled)


def test_a_preset_of_no_name_is_an_error():
    with pytest.raises(RecipeError, match="unknown preset of blocks"):
        Preset("NO")


def of_config(name: str, convention: str = "sd-mecha") -> Anatomy:
    config = resolve(name)
    return Anatomy(config.keys(), config, convention)


@pytest.mark.parametrize(("name", "middle"), [("sd1-ldm", 12), ("sdxl-sgm", 9)])
def test_a_preset_has_its_published_values_at_the_blocks_of_stable_diffusion(name, middle):
    bound = by_key({"blocks": {"preset": "GRAD_V", "IN01": 0.7}, "default": 0.5}).over(of_config(name))

    found = {value.block: value.values for value in effective_values(bound)}

    assert list(found)[:3] == ["BASE", "IN00", "IN01"]
    assert found["BASE"] == (0,)
    assert found["IN00"] == found[f"OUT{middle - 1:02}"] == (1,)
    assert found["IN01"] == (0.7,)
    assert found["IN02"] == pytest.approx((1 - 2 / middle,))
    assert found["M00"] == (0,)
    assert len(found) == 2 * middle + 2 + (name == "sdxl-sgm")  # its VAE


def test_blocks_are_chosen_by_a_pattern_and_components_by_name():
    found = values(of_config("sdxl-sgm"), {"OUT*": 0.7, "clip_l": 0.1, "re:attn2\\.to_k": 0.2, "default": 0})

    assert found["model.diffusion_model.output_blocks.3.0.in_layers.0.weight"] == 0.7
    assert found["conditioner.embedders.0.transformer.text_model.final_layer_norm.weight"] == 0.1
    attention = "transformer_blocks.0.attn2.to_k.weight"
    assert found[f"model.diffusion_model.input_blocks.4.1.{attention}"] == 0.2
    assert found[f"model.diffusion_model.output_blocks.3.1.{attention}"] == 0.2, "keys win over blocks"


def test_the_convention_says_whose_block_the_time_embedding_is():
    key = "model.diffusion_model.time_embed.0.weight"
    weights = by_key({"BASE": 0.1, "IN00": 0.9, "default": 0})

    assert weights.over(of_config("sd1-ldm"))(key) == 0.1
    assert weights.over(of_config("sd1-ldm", "supermerger"))(key) == 0.9


def test_a_gradient_says_nothing_of_what_has_no_depth():
    with pytest.raises(NoValueError, match="lies in no layer"):
        values(of_config("sd1-ldm"), {"default": [0, 1], "vae": 0.5})
    found = values(of_config("sd1-ldm"), {"default": 0.5, "diffuser": [0, 1], "BASE": 0.5})
    assert found["model.diffusion_model.middle_block.0.in_layers.0.weight"] == 0.5

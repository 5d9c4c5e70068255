"""Strengths by component, block and class, in the words of sd-mecha's older releases."""

import pytest
import torch

from mecha_exp import (
    MechaError,
    RecipeError,
    blocks,
    classes,
    default,
    deserialize,
    merge,
    model,
    serialize,
    weighted_sum,
)
from mecha_exp.extensions import model_configs
from mecha_exp.recipe.text_legacy import strengths

TEXT, TEXT_2 = "conditioner.embedders.0.transformer.text_model", "conditioner.embedders.1.model"
KEYS = {
    "text": f"{TEXT}.encoder.layers.2.mlp.fc1.bias",
    "other text": f"{TEXT}.encoder.layers.3.self_attn.q_proj.bias",
    "second": f"{TEXT_2}.ln_final.weight",
    "unet": "model.diffusion_model.input_blocks.4.1.norm.weight",
    "vae": "first_stage_model.encoder.norm_out.weight",
}


def merged(alpha):
    """What a strength comes to at each of the keys, in a merge of zeros with ones."""
    shapes = model_configs.resolve("sdxl-sgm").keys()
    a, b = (
        model({key: torch.full(shapes[key].shape, value) for key in KEYS.values()}, "sdxl-sgm")
        for value in (0.0, 1.0)
    )
    made = merge(weighted_sum(a, b, alpha=alpha))
    return {name: pytest.approx(made[key].unique().item()) for name, key in KEYS.items()}


@pytest.mark.parametrize("config", ["sdxl", "sdxl-sgm-base", "sdxl-sgm"])
def test_a_block_wins_over_its_component(config):
    alpha = default(config, "txt", 0.25) | blocks(config, "txt", in2=0.75) | default(config, "unet", 1)

    assert merged(alpha) == {"text": 0.75, "other text": 0.25, "second": 0, "unet": 1, "vae": 0}


def test_the_components_and_blocks_may_be_those_of_a_registered_config():
    alpha = default("sdxl-sgm", value=0.5) | blocks(model_configs.resolve("sdxl-sgm"), "diffuser", IN04=0.25)

    assert merged(alpha) == {"text": 0.5, "other text": 0.5, "second": 0.5, "unet": 0.25, "vae": 0.5}


def test_a_class_is_every_layer_of_that_name():
    old = default("sdxl", value=0.5) | classes("sdxl", "txt", mlp_fc1=0.25)
    new = default("sdxl-sgm", value=0.5) | classes("sdxl-sgm", "clip_l", self_attn_q_proj=0.25)

    assert merged(old) == {"text": 0.25, "other text": 0.5, "second": 0.5, "unet": 0.5, "vae": 0}
    assert merged(new) == {"text": 0.5, "other text": 0.25, "second": 0.5, "unet": 0.5, "vae": 0.5}


def test_values_in_order_are_those_of_the_blocks_of_the_model():
    in_order = blocks("sdxl", "txt", *(i / 16 for i in range(12)))

    assert in_order == blocks("sdxl", "txt", **{f"in{i}": i / 16 for i in range(12)})
    assert blocks("sd1", "unet", 1, 2, strict=False) == blocks("sd1", "unet", in0=1, in1=2)
    assert dict(blocks("sdxl-sgm", "diffuser", *range(20)).by_key().patterns)["OUT08"] == 19


def test_they_mean_what_the_words_of_an_older_recipe_mean():
    alpha = default("sd1", "txt", 0.33) | blocks("sd1", "unet", in1=0.2, mid=0.4)
    words = {"sd1_txt_default": 0.33, "sd1_unet_block_in1": 0.2, "sd1_unet_block_mid": 0.4}
    by_class = default("sd1", "unet", 0.5) | classes("sd1", "unet", attn1=0.1)

    assert alpha.by_key() == strengths(words)
    assert by_class.by_key() == strengths({"sd1_unet_default": 0.5, "sd1_unet_class_attn1": 0.1})
    assert weighted_sum("a", "b", alpha=alpha) is weighted_sum("a", "b", alpha=strengths(words))


@pytest.mark.parametrize("config", ["sdxl", "sdxl-sgm"])
def test_a_recipe_with_strengths_is_read_back_from_its_text(config):
    recipe = weighted_sum("a", "b", alpha=default(config, value=0.5) | blocks(config, "unet", in4=0.25))

    assert deserialize(serialize(recipe)) is recipe


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: default("sdx", "txt", 1), "unknown model config 'sdx'"),
        (
            lambda: weighted_sum(
                "a", "b", alpha=default("sd1-ldm", "vae", 1) | default("sdxl-sgm", "vae", 1)
            ),
            "strengths of several model configs in one: sd1-ldm, sdxl-sgm",
        ),
        (lambda: default("sdxl", "text", 1), "'sdxl' has no component 'text'. Did you mean 'txt' or 'txt2'?"),
        (lambda: blocks("sdxl", "unet", in22=1), "'unet' of 'sdxl' has no block 'in22'. Did you mean 'in2'?"),
        (lambda: blocks("sdxl-sgm", "diffuser", IN4=1), "has no block 'IN4'. Did you mean 'IN04'?"),
        (lambda: blocks("sdxl", "txt", 1, 2), "2 values for the 12 blocks of 'txt' of 'sdxl' (in0 to in11)"),
        (lambda: blocks("sdxl", "txt", 1, in2=2), "give the values in order or by name, not both"),
        (lambda: classes("sdxl", "txt", fc9=1), "no layer of 'txt' of 'sdxl' is named 'fc9'"),
    ],
)
def test_what_a_config_does_not_have_is_said(make, said):
    with pytest.raises(MechaError) as error:
        make()

    assert said in str(error.value)


def one_key(config: str):
    """A model with one key of the UNet that SD 1 and SDXL have in common."""
    key = "model.diffusion_model.out.0.bias"
    return model({key: torch.zeros(model_configs.resolve(config).keys()[key].shape)}, config)


def vae():
    """A VAE that is known by its keys and shapes."""
    keys = model_configs.resolve("vae-ldm").keys()
    return model({k: torch.zeros(info.shape, dtype=torch.float8_e4m3fn) for k, info in keys.items()})


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (
            lambda: one_key("sd1-ldm"),
            r"for the keys of 'sdxl-sgm', and model\(.*\) is of 'sd1-ldm'",
        ),
        (
            lambda: model({"x": torch.zeros(2)}),
            r"'sdxl-sgm', and model\(.*\) has none of them \(it has x\)\. Give",
        ),
        (
            lambda: model({"x": torch.zeros(2)}, "sdxl-diffusers"),
            "is of 'sdxl-diffusers', which has other keys",
        ),
        (
            lambda: weighted_sum(one_key("sd1-ldm"), one_key("sd1-ldm")),
            "and weighted_sum.* is of 'sd1-ldm'",
        ),
    ],
)
def test_strengths_for_another_config_are_an_error_and_not_0(models, said):
    with pytest.raises(RecipeError, match=f"weighted_sum: alpha: the values are .*{said}"):
        merge(weighted_sum(models(), models(), alpha=default("sdxl-sgm", "diffuser", 0.5)))


def test_strengths_by_older_names_that_name_no_key_are_an_error_and_not_0():
    unet = one_key("sdxl-sgm")

    with pytest.raises(
        RecipeError, match=r"the pattern 'model\.diffusion_model\.input_blocks\.11' matches none"
    ):
        merge(weighted_sum(unet, unet, alpha=blocks("sd1", "unet", in11=0.5)))

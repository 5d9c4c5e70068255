"""Recipe texts of sd-mecha before 0.1.0, without a version line, are recipes of today."""

from textwrap import dedent

import pytest
import torch

from mecha_exp import (
    RecipeError,
    add_difference,
    deserialize,
    model,
    parameter,
    subtract,
    ties_sum,
    weighted_sum,
)
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.recipe.text_legacy import strengths

TXT, UNET = "cond_stage_model.transformer.text_model", "model.diffusion_model"


def strength_of(alpha, *keys: str) -> list[float]:
    """The strength of some keys in a model that has a key for each selector."""
    names = [*keys, *(f"{selector}.0.fc.weight" for selector, _ in alpha.patterns)]
    bound = alpha.over(Anatomy.of({name: torch.empty(2) for name in names}))
    return [bound(key) for key in keys]


def test_models_have_an_architecture_and_a_type():
    text = dedent(r"""
        model "C:\new\ghostmix" "sd1" "base"
        model "pure/v1-5-pruned" "sd1"
        merge "subtract" &0 &1
        model "dreamshaper"
        merge "add_difference" &3 &2 alpha=1.0
        """)

    ghost, pure = model("C:\\new\\ghostmix", "sd1-ldm"), model("pure/v1-5-pruned", "sd1-ldm")
    assert deserialize(text) is add_difference("dreamshaper", subtract(ghost, pure))


def test_the_first_texts_said_call():
    assert deserialize('model "a"\nmodel "b"\ncall "weighted_sum" &0 &1 alpha=0.3') is weighted_sum(
        "a", "b", alpha=0.3
    )


def test_parameters_have_the_merge_spaces_of_their_time():
    text = 'parameter "a" "BASE" "sdxl"\nparameter "c" "DELTA"\nmerge "add_difference" &0 &1 alpha=1.0'

    expected = add_difference(parameter("a", "weight", "sdxl-sgm"), parameter("c", "delta"))
    assert deserialize(text) is expected


def test_numbers_get_the_types_of_today():
    text = 'parameter "d" "DELTA"\nmerge "ties_sum" &0 k=1 vote_sgn=1.0'

    assert deserialize(text) is ties_sum(parameter("d", "delta"), k=1.0, vote_sgn=True)


def test_a_dictionary_gives_components_their_strengths():
    text = dedent("""\
        model "a" "sd1" "base"
        model "b" "sd1" "base"
        dict sd1_txt_default=0.25 sd1_unet_default=1
        merge "weighted_sum" &0 &1 alpha=&2""")

    alpha = strengths({"sd1_txt_default": 0.25, "sd1_unet_default": 1})
    assert deserialize(text) is weighted_sum(model("a", "sd1-ldm"), model("b", "sd1-ldm"), alpha=alpha)
    keys = (f"{TXT}.encoder.layers.3.fc.bias", f"{UNET}.out.0.weight", "first_stage_model.conv_in.weight")
    assert strength_of(alpha, *keys) == [0.25, 1, 0]


def test_blocks_win_over_their_component():
    alpha = strengths(
        {
            "sd1_txt_block_in1": 0.1,
            "sd1_txt_block_in11": 0.2,
            "sd1_txt_default": 0.3,
            "sd1_unet_block_out11": 0.4,
        }
    )

    in_text = [f"{TXT}.encoder.layers.{i}.fc.bias" for i in (1, 11, 2)]
    assert strength_of(alpha, *in_text, f"{TXT}.final_layer_norm.weight") == [0.1, 0.2, 0.3, 0.2]
    in_unet = [f"{UNET}.{part}.0.weight" for part in ("output_blocks.11", "out", "output_blocks.10")]
    assert strength_of(alpha, *in_unet) == [0.4, 0.4, 0]


def test_what_several_blocks_share_has_the_mean_of_their_strengths():
    alpha = strengths({"sdxl_unet_block_mid": 0.2, "sdxl_unet_block_in1": 0.4, "sdxl_unet_block_in3": 9})

    shared, own = strength_of(alpha, f"{UNET}.time_embed.0.weight", f"{UNET}.middle_block.1.norm.weight")
    assert shared == pytest.approx(0.3), "in3 has no part in it"
    assert own == 0.2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('model "b" "sd1" "lora"', "a model of type 'lora' cannot be read from the old format"),
        ('lora "b"', 'In version 0.1.0 it is `merge "lora_delta" &1 &0`'),
        ('model "b" "sd1" "textual"', "a model of type 'textual' cannot be read from the old format"),
        ('parameter "b" "BSAE"', "unknown merge space 'BSAE'. Did you mean 'BASE'?"),
        ('model "b" 3', "expected an architecture in quotes, found 3"),
        ("literal 3", "unknown command 'literal': expected dict, model, lora, parameter, merge or call"),
        ('merge "slrp" &0 &0', "unknown merge method 'slrp'. Did you mean 'slerp'"),
    ],
)
def test_an_error_says_the_line(line, said):
    with pytest.raises(RecipeError) as error:
        deserialize(f'model "a"\n{line}')

    assert "line 2, column 1: " in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sd1_unt_default", "'sd1' has no component 'unt'. Did you mean 'unet'?"),
        ("sd1_unet_block_inn3", "'unet' of 'sd1' has no block 'inn3'. Did you mean 'in3'?"),
        (
            "sd3_unet_default",
            "'sd3_unet_default' cannot be read from the old format. Expected <architecture>_",
        ),
        ("sd1_unet_class_qq", "no layer of 'unet' of 'sd1' is named 'qq'"),
        ("sd1_unet_klass_q", "'sd1_unet_klass_q' cannot be read from the old format."),
    ],
)
def test_a_strength_that_names_nothing_is_refused(name, said):
    with pytest.raises(RecipeError) as error:
        strengths({name: 1})

    assert said in str(error.value)

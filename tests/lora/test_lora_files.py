"""How LoRA and LyCORIS files are recognised, and what is said of wrong ones."""

import pytest
import torch
from toy_lora import CONV, DOWN, LORA, OF_Q, SHARED, UP, Q, StateDict, added, base_model, lora, rand

import mecha_exp as m
from mecha_exp.architectures import (
    candidates,
    detect,
    from_yaml,
    get_all_adapters,
    register,
    resolve,
    to_yaml,
)
from mecha_exp.errors import CheckpointError
from mecha_exp.extensions import model_configs

# what a file is


def test_the_built_in_configs_have_the_names_of_sd_mecha():
    known = [config.identifier for config in model_configs.get_all_aux()]

    assert [name for name in known if name.startswith(("sd1-", "sdxl-"))] == [
        "sd1-kohya_kohya_lora",
        "sd1-kohya_lycoris_lora",
        "sdxl-kohya_but_diffusers_kohya_lora",
        "sdxl-kohya_but_diffusers_lycoris_lora",
        "sdxl-kohya_kohya_lora",
        "sdxl-kohya_lycoris_lora",
    ]
    assert {config.identifier for config in model_configs.get_all()} >= {*known, "sdxl-sgm"}
    assert {c.identifier for c in model_configs.get_all_base()}.isdisjoint(known)


@pytest.mark.parametrize(
    ("module", "shape", "config"),
    [
        ("lora_unet_down_blocks_0_attentions_0_proj_in", (320, 320), "sd1-kohya_kohya_lora"),
        ("lora_te_text_model_encoder_layers_11_mlp_fc2", (768, 3072), "sd1-kohya_kohya_lora"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_1_attn2_to_k", (640, 2048), "sdxl-kohya_kohya_lora"),
        (f"lora_unet_{SHARED}_attn2_to_k", (640, 2048), "sdxl-kohya_but_diffusers_kohya_lora"),
        (f"lora_unet_{SHARED}_attn2_to_k", (640, 768), "sd1-kohya_kohya_lora"),
        ("lycoris_unet_input_blocks_4_1_proj_in", (640, 640), "sdxl-kohya_lycoris_lora"),
    ],
)
def test_a_file_is_known_by_the_names_and_the_shapes_of_its_modules(
    module: str, shape: tuple[int, int], config: str
):
    up, down = torch.zeros(shape[0], 4), torch.zeros(4, shape[1])
    found = detect(lora(module, lora_up__weight=up, lora_down__weight=down, alpha=torch.tensor(4.0)))

    assert found.config.identifier == config
    assert (found.is_whole, found.extra) == (True, ())
    assert found.config.block_of(f"{module}.alpha") in found.config.base.blocks()


def test_a_file_that_may_be_of_two_models_is_what_leads_to_the_one_it_is_merged_with():
    module = f"lora_unet_{SHARED}_attn1_to_q"  # 640 wide in both
    file = lora(module, lora_up__weight=rand(640, 1), lora_down__weight=rand(1, 640))

    assert len(candidates(file)) == 2
    for target, key in {
        "sd1-ldm": "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight",
        "sdxl-sgm": "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight",
        "sdxl-diffusers_unet_only": "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight",
    }.items():
        assert added(file, target).keys() == {key}
        base = m.model({key: torch.zeros(640, 640)}, target)
        assert m.merge(base + m.lora_delta(file, base)).keys() == {key}


def test_a_config_of_ones_own_is_written_as_it_is_read():
    config = resolve("toy-kohya_kohya_lora")

    assert from_yaml(to_yaml(config)) == config
    assert config.base is resolve("toy-kohya")
    assert config.base_key("lora_unet_conv_0.lora_mid.weight") == CONV
    assert config.block_of("lora_unet_conv_1.alpha") == "IN01"
    assert config.keys()["lora_unet_conv_1.alpha"].shape == ()
    assert not any(key.startswith("lora_te_ids") for key in config.keys())
    assert config in get_all_adapters()
    with pytest.raises(m.ConfigError, match=r"no key 'lora_unet_conv_0\.lora_mdi\.weight'\. Did you mean"):
        config.base_key("lora_unet_conv_0.lora_mdi.weight")
    with pytest.raises(m.ConfigError, match="there is a model config 'toy-kohya_kohya_lora' already"):
        register(from_yaml(LORA.replace("prefix: lora", "prefix: other")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            LORA.replace("base: toy-kohya", "base: toy-khoya"),
            r"adapter\.base: unknown model config 'toy-khoya'",
        ),
        (LORA.replace("base: toy-kohya", "base: llama-hf"), "'llama-hf' has no keys of fixed shapes"),
        (LORA.replace("base: toy-kohya", "base: toy-kohya_lycoris_lora"), "has no keys of fixed shapes"),
        (LORA.replace(", prefix: lora", ""), r"adapter.*prefix"),
        (LORA + "\nsizes: {}", "sizes"),
    ],
)
def test_a_config_that_makes_no_sense_says_why(text: str, message: str):
    with pytest.raises(m.ConfigError, match=message):
        from_yaml(text)


# what is wrong with a file

WRONG: dict[str, tuple[StateDict, str]] = {
    "another rank": (
        lora("lora_te_layers_1_q", lora_up__weight=rand(8, 2), lora_down__weight=rand(3, 6)),
        r"_1_q\.lora_up\.weight \[8, 2\], lora_te_layers_1_q\.lora_down\.weight \[3, 6\] make no difference "
        r"to te\.layers\.1\.q\.weight \[8, 6\]: their ranks are 2 and 3",
    ),
    "another shape": (
        lora("lora_te_layers_1_q", lora_up__weight=rand(8, 2), lora_down__weight=rand(2, 7)),
        r"make a difference of shape \[8, 7\], and te\.layers\.1\.q\.weight is \[8, 6\]",
    ),
    "rank 0": (
        lora("lora_te_layers_1_q", lora_up__weight=rand(8, 0), lora_down__weight=rand(0, 6)),
        r"lora_up\.weight \[8, 0\].*of rank 0",
    ),
    "one of two": (lora("lora_te_layers_1_q", lora_up__weight=rand(8, 2)), r"lora_down\.weight is missing"),
    "alpha alone": (lora("lora_te_layers_1_q", alpha=torch.ones(())), "these tensors do not belong together"),
    "a vector": (
        lora("lora_te_layers_1_q", lora_up__weight=rand(8), lora_down__weight=rand(2, 6)),
        "is not a matrix",
    ),
    "two kinds": (
        lora(
            "lora_te_layers_1_q", lora_up__weight=rand(8, 2), lora_down__weight=rand(2, 6), lokr_w1=rand(2, 3)
        ),
        "these tensors do not belong together",
    ),
    "other cores": (
        lora(
            "lora_unet_conv_0",
            lora_up__weight=rand(6, 2),
            lora_mid__weight=rand(3, 2, 3, 3),
            lora_down__weight=rand(2, 4),
        ),
        r"the ranks are \[3, 2\] in the middle, and 2 and 2 outside",
    ),
    "products of other shapes": (
        lora(
            "lora_te_layers_1_q",
            hada_w1_a=rand(8, 2),
            hada_w1_b=rand(2, 6),
            hada_w2_a=rand(8, 2),
            hada_w2_b=rand(2, 5),
        ),
        r"its products are \[8, 6\] and \[8, 5\]",
    ),
    "a foreign module": (
        lora("lora_te_layers_7_q", lora_up__weight=UP, lora_down__weight=DOWN),
        r"2 keys are of no module of 'toy-kohya_kohya_lora': lora_te_layers_7_q\.lora_up\.weight \[8, 2\]",
    ),
    "DoRA": (
        lora("lora_te_layers_1_q", dora_scale=rand(1, 5), lora_up__weight=UP, lora_down__weight=DOWN),
        r"make no difference to .*: dora_scale \[1, 5\] is not a number for each output or input",
    ),
    "(IA)3": (
        lora("lora_te_layers_1_q", weight=rand(7), on_input=torch.zeros(())),
        "modules of this kind and shape are not known",
    ),
    "BOFT": (
        lora("lora_te_layers_1_q", oft_blocks=rand(2, 2, 4 * 4).reshape(2, 2, 4, 4)),
        "modules of this kind and shape are not known",
    ),
    "an older OFT": (
        lora("lora_te_layers_1_q", oft_diag=rand(2, 4)),
        r"Modules of an older OFT cannot be read",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_be_read_says_which_keys_and_shapes_are_wrong(name: str):
    wrong, message = WRONG[name]
    base = m.model(base_model(), "toy-kohya")
    file = {**wrong, **{k.replace("_q", f"_{x}"): t for x in "qkv" for k, t in OF_Q.items()}}

    with pytest.raises(m.CheckpointError, match=message):
        m.merge(base + m.convert(m.model(file), base))
    with pytest.raises(m.CheckpointError, match=message):
        m.merge(base + m.lora_delta(m.model(file), base))


def test_modules_that_a_merge_leaves_unfit_say_so_too():
    base, file = m.model(base_model(), "toy-kohya"), {**OF_Q}
    del file["lora_te_layers_0_q.lora_down.weight"]
    average = m.n_average(m.model(file, config="toy-kohya_kohya_lora"))

    with pytest.raises(
        m.MechaError, match=r"lora_te_layers_0_q\.lora_up\.weight \[8, 2\].*lora_down\.weight is missing"
    ):
        m.merge(base + m.convert(average, base))


def test_peft_names_are_named():
    file = {f"unet.mid.{i}.to_q.lora_{x}.weight": rand(4, 4) for i in range(3) for x in "AB"}

    with pytest.raises(
        m.RecipeError,
        match=r"of no known model config\. These are names of PEFT or diffusers: name the folder",
    ):
        m.convert(m.model(file), "sd1-ldm")


@pytest.mark.parametrize("ends", [("lora_A.weight", "lora_B.weight"), ("lora.down.weight", "lora.up.weight")])
def test_a_lora_in_names_that_are_not_read_is_named_where_the_model_is_no_diffusion_model(ends):
    file = {f"model.layers.{i}.self_attn.q_proj.{end}": rand(4, 4) for i in range(2) for end in ends}
    base = {f"model.layers.{i}.self_attn.q_proj.weight": rand(4, 4) for i in range(2)}

    with pytest.raises(m.RecipeError, match=r"names of PEFT or diffusers: .* or merge it into its model"):
        m.merge(m.lora_delta(m.model(file), m.model(base)))


def test_a_lora_of_another_model_says_what_both_are():
    base = m.model(base_model(), "toy-kohya")
    file = lora(
        "lora_te_text_model_encoder_layers_0_mlp_fc1",
        lora_up__weight=rand(3072, 2),
        lora_down__weight=rand(2, 768),
    )

    with pytest.raises(
        m.RecipeError,
        match=r"lora_delta: the LoRA is of 'sd1-kohya_kohya_lora' and the base of 'toy-kohya', and no",
    ):
        m.merge(base + m.lora_delta(file, base))
    with pytest.raises(m.RecipeError, match="no conversions lead from 'sd1-kohya_kohya_lora' to 'toy-kohya'"):
        m.convert(m.model(file), base)
    with pytest.raises(m.RecipeError, match="the base of no known model config"):
        m.merge(m.model({"x": rand(2, 2)}) + m.lora_delta(file, m.model({"x": rand(2, 2)})))


@pytest.mark.parametrize("kind", ["int8", "fp8 with scales"])
def test_factors_that_are_codes_are_refused_by_name(kind: str):
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    file = {key: tensor.to(dtype) if tensor.ndim else tensor for key, tensor in OF_Q.items()}
    if kind != "int8":
        file |= {f"lora_te_layers_0_q.lora_{end}.scale_weight": torch.tensor(0.5) for end in ("up", "down")}
    message = (
        r"lora_te_layers_0_q\.lora_up\.weight \(I8\).* are whole numbers: codes of a quantised file"
        if kind == "int8"
        else r"is quantised: scaled fp8 \(ComfyUI\), by 'lora_te_layers_0_q\.lora_"
    )

    with pytest.raises(CheckpointError, match=message):
        added(file)


def test_factors_of_scaled_fp8_are_read_exactly_where_that_is_asked_for():
    up, down = UP.to(torch.float8_e4m3fn), DOWN.to(torch.float8_e4m3fn)
    file = lora("lora_te_layers_0_q", lora_up__weight=up, lora_down__weight=down)
    file |= {f"lora_te_layers_0_q.lora_{end}.scale_weight": torch.tensor(0.5) for end in ("up", "down")}

    deltas = m.merge(
        m.convert(m.model(file, "toy-kohya_kohya_lora"), "toy-kohya"),
        options=m.EngineOptions(on_quantised="dequantise"),
    )

    torch.testing.assert_close(deltas[Q], (up.float() * 0.5) @ (down.float() * 0.5))


def test_a_lora_in_other_names_among_models_is_named():
    file = {f"model.layers.{i}.self_attn.q_proj.lora_{x}.weight": rand(4, 4) for i in range(2) for x in "AB"}
    base = {f"model.layers.{i}.self_attn.q_proj.weight": rand(4, 4) for i in range(2)}

    with pytest.raises(m.MechaError, match="of one architecture\\? These are names of PEFT or diffusers"):
        m.merge(m.weighted_sum(m.model(base), m.model(file), alpha=0.5))

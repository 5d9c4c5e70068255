"""LoRA and LyCORIS files: what they are, what they add to a model, and how they are made of a difference."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

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
from mecha_exp.method_api.registry import resolve_method

BASE = """
identifier: toy-kohya
components:
  text:
    prefix: te.
    keys:
      layers.{0,1}.{q,k,v}.weight: [8, 6]
      layers.{0,1}.{q,k,v}.bias: [8]
      ids: {shape: [3], dtype: int64, optional: true}
    blocks: BASE
  diffuser:
    prefix: unet.
    keys:
      conv.{0,1}.weight: [6, 4, 3, 3]
      proj.weight: [6, 4, 1, 1]
      norm.{weight,bias}: [6]
    blocks: {"conv.{0,1}.*": "IN0{0,1}", proj.*: OUT00, norm.*: OUT00}
"""
LORA = "identifier: toy-kohya_kohya_lora\nadapter: {base: toy-kohya, prefix: lora}"
LYCORIS = "identifier: toy-kohya_lycoris_lora\nadapter: {base: toy-kohya, prefix: lycoris}"
Q, CONV, PROJ = "te.layers.0.q.weight", "unet.conv.0.weight", "unet.proj.weight"

SHARED = "down_blocks_1_attentions_0_transformer_blocks_0"
"""Diffusers' name of a layer of SD1 and of SDXL."""

StateDict = dict[str, Tensor]


@pytest.fixture(autouse=True)
def toy(registries: None) -> None:
    for text in (BASE, LORA, LYCORIS):
        register(from_yaml(text))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def base_model(seed: int = 1) -> StateDict:
    made = {
        key: rand(*info.shape, seed=seed + i)
        for i, (key, info) in enumerate(resolve("toy-kohya").keys().items())
        if info.dtype != "int64"
    }
    return made | {"te.ids": torch.arange(3)}


def lora(module: str, **tensors: Tensor) -> StateDict:
    return {f"{module}.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}


UP, DOWN = rand(8, 2), rand(2, 6)
OF_Q = lora(
    "lora_te_layers_0_q", lora_up__weight=UP, lora_down__weight=DOWN, alpha=torch.tensor(4.0).double()
)


def added(files: StateDict, target: str = "toy-kohya") -> StateDict:
    """What the modules add, computed in float64."""
    options = m.EngineOptions(compute_dtype=torch.float64)
    return m.merge(m.convert(m.model(files), target), options=options)


# what a module adds, by the definitions of kohya's scripts and LyCORIS

A, B, CORE = rand(2, 8), rand(2, 6), rand(2, 2)
MODULES: dict[str, tuple[str, StateDict, Tensor]] = {
    "with alpha": (Q, OF_Q, UP @ DOWN * 4 / 2),
    "without alpha": (Q, lora("lora_te_layers_0_q", lora_up__weight=UP, lora_down__weight=DOWN), UP @ DOWN),
    "a convolution": (
        CONV,
        lora("lora_unet_conv_0", lora_up__weight=rand(6, 2, 1, 1), lora_down__weight=rand(2, 4, 3, 3)),
        torch.einsum("or, rikl -> oikl", rand(6, 2, 1, 1)[:, :, 0, 0], rand(2, 4, 3, 3)),
    ),
    "a convolution with a core": (
        CONV,
        lora(
            "lora_unet_conv_0",
            lora_up__weight=rand(6, 3, seed=2)[:, :, None, None],
            lora_mid__weight=rand(3, 2, 3, 3),
            lora_down__weight=rand(2, 4, seed=2)[:, :, None, None],
            alpha=torch.tensor(1.0).double(),
        ),
        torch.einsum("or, rskl, si -> oikl", rand(6, 3, seed=2), rand(3, 2, 3, 3), rand(2, 4, seed=2)) / 2,
    ),
    "a linear module of a convolution of one": (
        PROJ,
        lora("lora_unet_proj", lora_up__weight=rand(6, 2), lora_down__weight=rand(2, 4)),
        (rand(6, 2) @ rand(2, 4))[:, :, None, None],
    ),
    "LoHa": (
        Q,
        lora(
            "lora_te_layers_0_q",
            hada_w1_a=rand(8, 2),
            hada_w1_b=rand(2, 6),
            hada_w2_a=rand(8, 2, seed=5),
            hada_w2_b=rand(2, 6, seed=5),
            alpha=torch.tensor(1.0).double(),
        ),
        (rand(8, 2) @ rand(2, 6)) * (rand(8, 2, seed=5) @ rand(2, 6, seed=5)) / 2,
    ),
    "LoHa of a convolution": (
        CONV,
        lora(
            "lora_unet_conv_0",
            hada_w1_a=rand(6, 2),
            hada_w1_b=rand(2, 36),
            hada_w2_a=rand(6, 2, seed=5),
            hada_w2_b=rand(2, 36, seed=5),
        ),
        ((rand(6, 2) @ rand(2, 36)) * (rand(6, 2, seed=5) @ rand(2, 36, seed=5))).reshape(6, 4, 3, 3),
    ),
    "LoHa with cores": (
        CONV,
        lora(
            "lora_unet_conv_0",
            hada_w1_a=rand(2, 6),
            hada_w1_b=rand(2, 4),
            hada_t1=rand(2, 2, 3, 3),
            hada_w2_a=rand(2, 6, seed=5),
            hada_w2_b=rand(2, 4, seed=5),
            hada_t2=rand(2, 2, 3, 3, seed=5),
        ),
        torch.einsum("ijkl, ip, jr -> prkl", rand(2, 2, 3, 3), rand(2, 6), rand(2, 4))
        * torch.einsum(
            "ijkl, ip, jr -> prkl", rand(2, 2, 3, 3, seed=5), rand(2, 6, seed=5), rand(2, 4, seed=5)
        ),
    ),
    "LoKr of whole factors, whose alpha means nothing": (
        Q,
        lora("lora_te_layers_0_q", lokr_w1=rand(2, 3), lokr_w2=rand(4, 2), alpha=torch.tensor(7.0).double()),
        torch.kron(rand(2, 3), rand(4, 2)),
    ),
    "LoKr of products": (
        Q,
        lora(
            "lora_te_layers_0_q",
            lokr_w1_a=rand(2, 1),
            lokr_w1_b=rand(1, 3),
            lokr_w2_a=rand(4, 1),
            lokr_w2_b=rand(1, 2),
            alpha=torch.tensor(3.0).double(),
        ),
        torch.kron(rand(2, 1) @ rand(1, 3), rand(4, 1) @ rand(1, 2)) * 3,
    ),
    "LoKr of a convolution": (
        CONV,
        lora("lora_unet_conv_0", lokr_w1=rand(2, 2), lokr_w2_a=rand(3, 2), lokr_w2_b=rand(2, 18)),
        torch.kron(rand(2, 2)[:, :, None, None], (rand(3, 2) @ rand(2, 18)).reshape(3, 2, 3, 3)),
    ),
    "LoKr with a core": (
        CONV,
        lora(
            "lora_unet_conv_0",
            lokr_w1=rand(2, 2),
            lokr_t2=rand(2, 2, 3, 3),
            lokr_w2_a=rand(2, 3),
            lokr_w2_b=rand(2, 2, seed=9),
            alpha=torch.tensor(1.0).double(),
        ),
        torch.kron(
            rand(2, 2)[:, :, None, None],
            torch.einsum(
                "ijkl, ip, jr -> prkl", rand(2, 2, 3, 3), rand(2, 3), rand(2, 2, seed=9)
            ).contiguous(),
        )
        / 2,
    ),
    "a whole difference": (Q, lora("lora_te_layers_0_q", diff=rand(8, 6)), rand(8, 6)),
    "that of a bias": ("te.layers.0.q.bias", lora("lora_te_layers_0_q", diff_b=rand(8)), rand(8)),
    "that of a norm": ("unet.norm.weight", lora("lora_unet_norm", w_norm=rand(6)), rand(6)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_adds_what_its_definition_says(name: str):
    key, module, wanted = MODULES[name]

    of_a_file, computed = added(module), m.convert(m.n_average(m.model(module)), "toy-kohya")

    assert of_a_file.keys() == {key}
    torch.testing.assert_close(of_a_file[key], wanted)
    of_a_merge = m.merge(computed, options=m.EngineOptions(compute_dtype=torch.float64))
    torch.testing.assert_close(of_a_merge[key], wanted)


# among themselves


def test_files_are_merged_with_each_other_as_they_are_with_all_their_keys():
    one = {**OF_Q, "lora_te_layers_0_q.dora_scale": torch.ones(8, 1).double()}
    other = {key: 3 * tensor for key, tensor in one.items()}

    merged = m.merge(m.weighted_sum(one, other, alpha=0.5), merge_dtype=torch.float64)

    assert merged.keys() == one.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(merged[key], 2 * tensor)
    with pytest.raises(
        m.CheckpointError, match=r"lacks 1 of the 4 keys that the other inputs have: .*dora_scale"
    ):
        m.merge(m.weighted_sum(one, OF_Q, alpha=0.5))


def test_the_average_of_what_two_files_add_is_that_of_the_differences():
    b = m.model(base_model(), "toy-kohya")
    other = {key: -tensor for key, tensor in OF_Q.items()}

    merged = m.merge(m.weighted_sum(m.lora_delta(OF_Q, b), m.lora_delta(other, b), alpha=0.25))

    torch.testing.assert_close(merged[Q], (UP @ DOWN * 2) * (0.75 - 0.25))


# with a model


def test_a_model_gets_what_a_lora_adds_and_keeps_the_rest(save, tmp_path: Path):
    base = base_model()
    path, file = save("base", base), save("lora", OF_Q)
    b = m.model(path)

    for name, recipe in {
        "half": b + 0.5 * m.convert(m.model(file), b),
        "by the method": m.add_difference(b, m.lora_delta(file, b), alpha=0.5),
        "a sum": m.weighted_sum(b, b + m.convert(file, b), alpha=0.5),
        "by block": m.add_difference(
            b, m.lora_delta(file, b), alpha={"BASE": 0.5, "IN00": 9.0, "default": 3.0}
        ),
    }.items():
        merged = load_file(
            m.merge(recipe, output=tmp_path / f"{name}.safetensors", merge_dtype=torch.float64)
        )
        assert merged.keys() == base.keys()
        for key, tensor in base.items():
            wanted = tensor + UP @ DOWN if key == Q else tensor
            torch.testing.assert_close(merged[key], wanted, msg=lambda s, k=key, n=name: f"{n}: {k}: {s}")


@pytest.mark.parametrize("computed", [False, True])
def test_what_no_module_may_change_is_merged_as_without_a_lora(computed: bool, caplog):
    ema, numbers = (
        "model_ema.diffusion_modeltime_embed0bias",
        "cond_stage_model.transformer.text_model.embeddings.position_ids",
    )
    shape = resolve("sd1-ldm").keys()[ema].shape
    models = [{ema: torch.full(shape, x), numbers: torch.arange(77)[None]} for x in (1.0, 3.0)]
    a, b = (m.model(model, "sd1-ldm") for model in models)
    lora = m.model({"lora_vae_quant_conv.diff": torch.ones(8, 8)}, "sd1-kohya_kohya_lora")
    key = "first_stage_model.quant_conv.weight"
    for model in models:
        model[key] = torch.zeros(8, 8, 1, 1)

    merged = m.merge(m.weighted_sum(a, b + m.convert(m.n_average(lora) if computed else lora, "sd1-ldm")))

    assert (merged[ema].unique().tolist(), merged[key].unique().tolist()) == ([2.0], [0.5])
    assert torch.equal(merged[numbers], models[0][numbers])
    assert computed or "taken from" not in caplog.text


def test_two_loras_add_up():
    b = m.model(base_model(), "toy-kohya")
    other = {key.replace("_q.", "_k."): tensor for key, tensor in OF_Q.items()}

    merged = m.merge(b + m.lora_delta(OF_Q, b) - 2 * m.lora_delta(other, b), merge_dtype=torch.float64)

    torch.testing.assert_close(merged[Q], base_model()[Q] + UP @ DOWN * 2)
    torch.testing.assert_close(
        merged["te.layers.0.k.weight"], base_model()["te.layers.0.k.weight"] - UP @ DOWN * 4
    )
    assert torch.equal(merged[CONV], base_model()[CONV])


def test_what_a_lora_adds_is_the_same_bytes_whatever_the_threads_and_tiles(save, tmp_path: Path):
    b, file = m.model(save("base", base_model())), save("lora", {**OF_Q, **MODULES["LoKr with a core"][1]})
    recipe, made = b + m.lora_delta(file, b), []

    for workers, tile in ((1, 16), (3, 1 << 20)):
        out = tmp_path / f"{workers}.safetensors"
        m.merge(recipe, out, options=m.EngineOptions(workers=workers, tile_size=tile))
        made.append(load_file(out))

    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])


def test_a_lora_that_changes_what_the_model_lacks_is_an_error():
    part = {key: tensor for key, tensor in base_model().items() if key != Q}

    with pytest.raises(m.CheckpointError, match=rf"lacks 1 of the \d+ keys that the other inputs have: {Q}"):
        m.merge(m.model(part, "toy-kohya") + m.lora_delta(OF_Q, m.model(part, "toy-kohya")))


def test_a_projection_of_which_a_lora_changes_the_queries_alone():
    up, down = rand(1280, 1), rand(1, 1280)
    file = lora(
        "lora_te2_text_model_encoder_layers_0_self_attn_q_proj", lora_up__weight=up, lora_down__weight=down
    )
    key = "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight"

    made = added(file, "sdxl-sgm")
    computed = m.merge(m.convert(m.convert(m.n_average(m.model(file)), "sdxl-kohya"), "sdxl-sgm"))

    assert made.keys() == computed.keys() == {key}
    torch.testing.assert_close(made[key], torch.cat([up @ down, torch.zeros(2560, 1280)]).double())
    torch.testing.assert_close(computed[key], made[key].to(computed[key].dtype), rtol=1e-5, atol=1e-5)


def test_modules_of_what_the_model_does_not_have_are_named(caplog):
    file = {
        "lora_unet_conv_in.diff": torch.ones(320, 4, 3, 3),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.diff": torch.ones(3072, 768),
    }
    unet = m.model({"conv_in.weight": torch.zeros(320, 4, 3, 3)}, "sd1-diffusers_unet_only")

    merged = m.merge(unet + m.lora_delta(file, unet))

    assert merged["conv_in.weight"].unique().tolist() == [1]
    assert (
        "1 keys are left out, as 'sd1-diffusers_unet_only' has nothing that they change: "
        "lora_te_text_model_encoder_layers_0_mlp_fc1.diff"
    ) in caplog.text


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


def test_an_interface_may_choose_by_itself_and_its_defaults_hold():
    @m.merge_method(register=False)
    def times(a: m.Parameter(Tensor), factor: m.Parameter(float)) -> m.Return(Tensor):
        return a * factor

    asked: list[list[str]] = []

    def choose(configs):
        asked.append([config.identifier for config in configs["a"]])
        return times

    @m.merge_method(is_interface=True, choose=choose, identifier="doubled in test_adapters")
    def doubled(
        a: m.Parameter(m.StateDict[Tensor]),
        b: m.Parameter(m.StateDict[Tensor], "weight") = None,
        factor: m.Parameter(float) = 2.0,
    ) -> m.Return(Tensor):
        """Never run."""

    for recipe, factor in ((doubled(base_model()), 2), (doubled(base_model(), base_model(), factor=3.0), 3)):
        merged = m.merge(recipe, merge_dtype=torch.float64)
        torch.testing.assert_close(merged[Q], base_model()[Q] * factor)
    assert asked == [["toy-kohya"]] * len(asked)


def test_an_interface_that_chooses_is_an_interface():
    with pytest.raises(m.RecipeError, match="it needs `is_interface=True`"):
        m.merge_method(choose=lambda configs: m.scale)


# a difference of models as such a file

LOKR = {"kohya": m.extract_kohya_lokr, "lycoris": m.extract_lycoris_lokr}
EXTRACTIONS: dict[str, Callable[..., m.Node]] = {
    "kohya": m.extract_kohya_lora,
    "lycoris": m.extract_lycoris_lora,
}


def difference() -> tuple[m.Node, StateDict]:
    fine, base = base_model(2), base_model(1)
    deltas = {key: fine[key] - base[key] for key in base if key != "te.ids"}
    return m.model(fine, "toy-kohya") - m.model(base, "toy-kohya"), deltas


def best(delta: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(delta.flatten(1), full_matrices=False)
    return (u[:, :rank] * s[:rank] @ vh[:rank]).reshape(delta.shape)


@pytest.mark.parametrize("writer", EXTRACTIONS)
@pytest.mark.parametrize("rank", [1, 2, 3, 100])
def test_a_lora_that_is_extracted_is_the_best_one_of_its_rank(writer: str, rank: int, tmp_path: Path):
    node, deltas = difference()
    path = tmp_path / "lora.safetensors"

    made = EXTRACTIONS[writer](node, rank=rank, use_approximate_basis=False)
    m.merge(made, path, merge_dtype=torch.float64)

    file = load_file(path)
    prefix = {"kohya": "lora", "lycoris": "lycoris"}[writer]
    matrices = {key: delta for key, delta in deltas.items() if delta.ndim > 1}
    modules = {f"{prefix}_{key.removesuffix('.weight').replace('.', '_')}" for key in matrices}
    assert file.keys() == {
        f"{x}.{end}" for x in modules for end in ("lora_up.weight", "lora_down.weight", "alpha")
    }
    assert file[f"{prefix}_unet_conv_0.lora_up.weight"].shape == (6, min(rank, 6), 1, 1)
    assert file[f"{prefix}_unet_conv_0.lora_down.weight"].shape == (min(rank, 6), 4, 3, 3)
    assert file[f"{prefix}_te_layers_0_q.alpha"] == min(rank, 6)
    assert detect(file).config.identifier == f"toy-kohya_{writer}_lora"
    again = added(file)
    assert again.keys() == matrices.keys()
    for key, delta in matrices.items():
        torch.testing.assert_close(again[key], best(delta, rank), msg=lambda s, k=key: f"{k}: {s}")


def test_an_approximate_basis_finds_a_difference_of_low_rank_and_depends_on_the_seed_alone():
    low = {key: best(delta, 2) for key, delta in difference()[1].items() if delta.ndim > 1}
    node = m.model(low, "toy-kohya", "delta")

    made = m.merge(m.extract_kohya_lora(node, rank=2), merge_dtype=torch.float64)

    for key, delta in low.items():
        torch.testing.assert_close(added(made)[key], delta, rtol=1e-6, atol=1e-8)
    again = m.merge(
        m.extract_kohya_lora(node, rank=2, approximate_basis_seed=None), merge_dtype=torch.float64
    )
    assert all(torch.equal(made[key], again[key]) for key in made)


@pytest.mark.parametrize("writer", ["kohya", "lycoris"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.8])
def test_a_lokr_that_is_extracted_is_the_nearest_product(writer: str, ratio: float):
    node, deltas = difference()

    made = m.merge(LOKR[writer](node, ratio), merge_dtype=torch.float64)

    assert {key.partition(".")[2] for key in made} == {"lokr_w1", "lokr_w2"}
    assert detect(made).config.identifier == f"toy-kohya_{writer}_lora"
    for key, tensor in added(made).items():
        wanted = m.truncate_kronecker.__wrapped__(deltas[key], ratio, use_approximate_basis=False)
        torch.testing.assert_close(tensor, wanted)


def test_an_extraction_is_converted_without_a_file_between():
    node, deltas = difference()

    made = m.convert(m.extract_kohya_lora(node, rank=2, use_approximate_basis=False), "toy-kohya")

    merged = m.merge(made, merge_dtype=torch.float64)
    torch.testing.assert_close(merged[CONV], best(deltas[CONV], 2))


def test_ranks_by_block_are_those_of_the_blocks_of_the_model():
    node, _ = difference()

    made = m.merge(m.extract_kohya_lora(node, rank={"BASE": 1, "IN01": 2, "default": 4}))

    ranks = {key.split(".")[0]: tensor.shape[0] for key, tensor in made.items() if "lora_down" in key}
    assert ranks["lora_te_layers_1_v"] == 1
    assert (ranks["lora_unet_conv_0"], ranks["lora_unet_conv_1"], ranks["lora_unet_proj"]) == (4, 2, 4)


def test_a_difference_without_names_of_modules_is_converted_or_an_error():
    key = "model.diffusion_model.input_blocks.1.0.in_layers.2.weight"
    delta = rand(320, 320, 3, 3)
    made = m.merge(m.extract_kohya_lora(m.model({key: delta}, "sdxl-sgm", "delta"), rank=1))
    assert set(made) == {
        f"lora_unet_input_blocks_1_0_in_layers_2.{x}" for x in ("lora_up.weight", "lora_down.weight", "alpha")
    }

    with pytest.raises(
        m.RecipeError,
        match=r"no names of modules for 'llama-hf', only for the architectures auraflow, .*sd1, ",
    ):
        m.merge(m.extract_kohya_lora(m.model({"model.norm.weight": rand(4)}, "llama-hf", "delta")))
    with pytest.raises(m.RecipeError, match="rank: 0 is out of range"):
        m.extract_kohya_lora(m.model({key: delta}, "sdxl-sgm", "delta"), rank=0)


# keys that are made together


def test_a_hyperparameter_that_differs_within_a_group_of_keys_is_an_error():
    @m.merge_method(register=False)
    class together:
        @staticmethod
        def map_keys(b):
            b["x", "y"] = b.a.keys["x", "y"]

        def __call__(
            self, a: m.Parameter(m.StateDict[Tensor]), alpha: m.Parameter(float), **kwargs
        ) -> m.Return(Tensor):
            return {key: a[key] * alpha for key in kwargs["key_relation"].outputs}

    model = {"x": rand(2), "y": rand(3)}

    merged = m.merge(together(model, alpha={"x": 2.0, "y": 2}), merge_dtype=torch.float64)
    torch.testing.assert_close(merged["y"], model["y"] * 2)
    with pytest.raises(
        m.RecipeError,
        match=r"together: alpha: 2 keys are made together, so they have one value, and not 2\.0 at x, "
        r"3\.0 at y\. The keys: x, y\.",
    ):
        m.merge(together(model, alpha={"x": 2.0, "y": 3.0}))


# as text


def test_a_recipe_with_a_lora_is_written_in_the_words_of_sd_mecha_and_read_back():
    recipe = m.model("base.safetensors", "sd1-ldm") + m.convert(
        m.model("lora.safetensors", "sd1-kohya_kohya_lora"), "sd1-ldm"
    )

    text = m.serialize(recipe)

    assert "merge \"convert_'sd1-kohya_kohya_lora'_to_base\" &1" in text
    assert "merge \"convert_'sd1-kohya'_to_'sd1-ldm'\" &2" in text
    assert m.deserialize(text) is recipe
    older = text.replace("convert_'sd1-kohya'_to_'sd1-ldm'", "convert 'sd1-kohya' to 'sd1-ldm'")
    assert m.deserialize(older) is recipe
    for wrong in (
        "convert_'sd1-kohya'_to_base",
        "convert_'none-such'_to_base",
        "convert_'sd1-kohya'_to_'llama-hf'",
    ):
        with pytest.raises(m.RecipeError, match="unknown merge method"):
            m.deserialize(text.replace("convert_'sd1-kohya_kohya_lora'_to_base", wrong))


def test_a_template_adds_the_lora_that_fills_it(save):
    text = (
        'version 0.1.0\nparameter "base"\nparameter "lora"\nmerge "lora_delta" &1 &0\n'
        'merge "add_difference" &0 &2 alpha=0.5'
    )
    base, file = save("base", base_model()), save("lora", OF_Q)

    recipe = m.fill(m.deserialize(text), {"base": base, "lora": file})

    assert m.deserialize(m.serialize(recipe)) is recipe
    merged = m.merge(recipe, merge_dtype=torch.float64)
    torch.testing.assert_close(merged[Q], base_model()[Q] + UP @ DOWN)


def test_blocks_of_sd_mecha_are_converted_by_its_names():
    ours = resolve_method("convert_sdxl_blocks_to_sgm")

    assert resolve_method("convert 'sdxl-supermerger_blocks' to 'sdxl-sgm'") is ours
    assert ours.identifier == "convert_sdxl_blocks_to_sgm"


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

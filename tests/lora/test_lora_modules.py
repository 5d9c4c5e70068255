"""What the modules of LoRA and LyCORIS files add to a model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from toy_lora import CONV, DOWN, OF_Q, PROJ, UP, Q, StateDict, added, base_model, lora, rand

import mecha_exp as m
from mecha_exp.architectures import (
    resolve,
)

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
        "1 key is left out, as 'sd1-diffusers_unet_only' has nothing that they change: "
        "lora_te_text_model_encoder_layers_0_mlp_fc1.diff"
    ) in caplog.text

"""Adapters of PEFT are differences to a base: the formulas, by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft_tensors import HEAD, SHAPES, O, Q, lora, rand
from safetensors.torch import load_file, save_file
from torch import Tensor

import mecha_exp as m
from mecha_exp.engine import EngineOptions

PREFIX = "base_model.model."
Base = dict[str, Tensor]


def product(tensors: Base, module: str, scale: float) -> Tensor:
    a, b = (tensors[f"{PREFIX}{module}.lora_{x}.weight"] for x in "AB")
    return scale * b @ a


def merged(adapter: str, options: EngineOptions | None = None) -> Base:
    base = m.model("base")
    return dict(m.merge(base + m.lora_delta(adapter, base), options=options))


def assert_changes(result: Base, base: Base, changed: dict[str, Tensor]) -> None:
    assert result.keys() == base.keys()
    for key, before in base.items():
        expected = before + changed[key] if key in changed else before
        torch.testing.assert_close(result[key], expected, rtol=1e-6, atol=1e-6)
        assert key in changed or torch.equal(result[key], before)


def test_alpha_over_the_rank_scales_the_product(base: Base, adapter: Callable[..., str]):
    factors = lora(Q, O)
    adapter("lora", factors)

    assert_changes(merged("lora"), base, {f"{x}.weight": product(factors, x, 3.0) for x in (Q, O)})


def test_patterns_and_rank_stabilisation_decide_the_scale(base: Base, adapter: Callable[..., str]):
    factors = lora(Q, O) | lora("model.layers.1.q_proj", rank=4, seed=5)
    adapter(
        "lora",
        factors,
        use_rslora=True,
        rank_pattern={"1.q_proj": 4},
        alpha_pattern={"layers.0.q_proj": 10, "q_proj": 20},
    )

    scales = {Q: 10 / 2**0.5, O: 6 / 2**0.5, "model.layers.1.q_proj": 20 / 2}
    assert_changes(merged("lora"), base, {f"{x}.weight": product(factors, x, s) for x, s in scales.items()})


def test_whole_tensors_take_the_place_of_those_of_the_base(base: Base, adapter: Callable[..., str]):
    whole = {f"{PREFIX}lm_head.weight": rand(20, 6, seed=3), f"{PREFIX}{Q}.base_layer.bias": rand(8, seed=4)}
    adapter("lora", lora(O) | whole, modules_to_save=["lm_head"], bias="lora_only")

    result = merged("lora")

    torch.testing.assert_close(result["lm_head.weight"], whole[f"{PREFIX}lm_head.weight"])
    torch.testing.assert_close(result[f"{Q}.bias"], whole[f"{PREFIX}{Q}.base_layer.bias"])
    assert torch.equal(result[f"{Q}.weight"], base[f"{Q}.weight"])


def test_a_bias_of_the_adapter_is_scaled_and_added(base: Base, adapter: Callable[..., str]):
    factors = lora(Q) | {f"{PREFIX}{Q}.lora_B.bias": rand(8)}
    adapter("lora", factors, lora_bias=True)

    changed = {f"{Q}.weight": product(factors, Q, 3.0), f"{Q}.bias": 3.0 * rand(8)}
    assert_changes(merged("lora"), base, changed)


def test_the_factors_of_an_embedding_are_stored_the_other_way_round(base: Base, adapter: Callable[..., str]):
    rows, columns = rand(2, 20), rand(6, 2)
    inner = f"{PREFIX}model.embed_tokens."
    adapter("lora", {f"{inner}lora_embedding_A": rows, f"{inner}lora_embedding_B": columns})

    assert_changes(merged("lora"), base, {"model.embed_tokens.weight": 3.0 * (columns @ rows).T})


def test_a_convolution_has_the_kernel_in_its_first_factor(base: Base, adapter: Callable[..., str]):
    down, up = rand(2, 6, 3, 3), rand(4, 2, 1, 1)
    inner = f"{PREFIX}model.conv."
    adapter("lora", {f"{inner}lora_A.weight": down, f"{inner}lora_B.weight": up})

    change = 3.0 * torch.einsum("or,rikl->oikl", up[:, :, 0, 0], down)
    assert_changes(merged("lora"), base, {"model.conv.weight": change})


def test_loha_and_lokr_are_products_of_their_kinds(base: Base, adapter: Callable[..., str]):
    inner = f"{PREFIX}{Q}."
    pairs = {"w1_a": rand(8, 2), "w1_b": rand(2, 6), "w2_a": rand(8, 2, seed=1), "w2_b": rand(2, 6, seed=1)}
    adapter("loha", {f"{inner}hada_{name}": t for name, t in pairs.items()}, peft_type="LOHA", alpha=4)
    first, second = rand(2, 3), {"a": rand(4, 2), "b": rand(2, 2)}
    lokr = {f"{inner}lokr_w1": first} | {f"{inner}lokr_w2_{name}": t for name, t in second.items()}
    adapter("lokr", lokr, peft_type="LOKR", alpha=4)

    hadamard = (pairs["w1_a"] @ pairs["w1_b"]) * (pairs["w2_a"] @ pairs["w2_b"])
    assert_changes(merged("loha"), base, {f"{Q}.weight": 2.0 * hadamard})
    kronecker = torch.kron(first, second["a"] @ second["b"])
    assert_changes(merged("lokr"), base, {f"{Q}.weight": 2.0 * kronecker})


def test_dora_gives_each_output_its_magnitude(base: Base, adapter: Callable[..., str]):
    magnitude = rand(8).abs()
    factors = lora(Q)
    adapter("lora", factors | {f"{PREFIX}{Q}.lora_magnitude_vector": magnitude}, use_dora=True)

    result = merged("lora")[f"{Q}.weight"]

    torch.testing.assert_close(result.norm(dim=1), magnitude)
    adapted = base[f"{Q}.weight"] + product(factors, Q, 3.0)
    torch.testing.assert_close(result, adapted * (magnitude / adapted.norm(dim=1))[:, None])


def test_square_tensors_are_read_as_the_configuration_says(
    base: Base, adapter: Callable[..., str], tmp_path: Path
):
    weights = {"h.0.attn.c_proj.weight": rand(6, 6)}
    save_file(weights, tmp_path / "base" / "model.safetensors")
    inner = f"{PREFIX}h.0.attn.c_proj.lora"
    factors = {f"{inner}_A.weight": rand(2, 6), f"{inner}_B.weight": rand(6, 2)}
    adapter("conv1d", factors, fan_in_fan_out=True)

    change = product(factors, "h.0.attn.c_proj", 3.0).T
    assert_changes(merged("conv1d"), weights, {"h.0.attn.c_proj.weight": change})


def test_square_tensors_are_read_like_their_namesakes(
    base: Base, adapter: Callable[..., str], tmp_path: Path
):
    names = ("h.0.attn.c_proj", "h.0.mlp.c_proj")
    weights = {f"{names[0]}.weight": rand(6, 6), f"{names[1]}.weight": rand(9, 6)}
    save_file(weights, tmp_path / "gpt.safetensors")
    factors = {
        f"{PREFIX}transformer.{name}.lora_{letter}.weight": rand(*shape)
        for name, shapes in zip(names, (((2, 6), (6, 2)), ((2, 9), (6, 2))), strict=True)
        for letter, shape in zip("AB", shapes, strict=True)
    }
    adapter("lora", factors)

    result = m.merge(m.model("gpt") + m.lora_delta("lora", m.model("gpt")))

    for name in names:
        change = product(factors, f"transformer.{name}", 3.0).T
        torch.testing.assert_close(result[f"{name}.weight"], weights[f"{name}.weight"] + change)


def test_an_adapter_stands_for_the_base_with_what_it_adds(base: Base, adapter: Callable[..., str]):
    factors = {"a": lora(Q), "b": lora(Q, O, seed=7)}
    for name, tensors in factors.items():
        adapter(name, tensors)

    ties = m.merge(m.task_arithmetic("base", "a", "b", weights=[0.5, -0.25]))

    change = 0.5 * product(factors["a"], Q, 3.0) - 0.25 * product(factors["b"], Q, 3.0)
    torch.testing.assert_close(ties[f"{Q}.weight"], base[f"{Q}.weight"] + change, rtol=1e-5, atol=1e-6)
    half = m.merge(m.weighted_sum("base", "a", alpha=0.5))
    expected = base[f"{Q}.weight"] + 0.5 * product(factors["a"], Q, 3.0)
    torch.testing.assert_close(half[f"{Q}.weight"], expected)


def test_differences_of_adapters_are_added_exactly(base: Base, adapter: Callable[..., str]):
    factors = {"a": lora(Q), "b": lora(Q, O, seed=7)}
    for name, tensors in factors.items():
        adapter(name, tensors)
    node = m.model("base")

    total = m.merge(0.7 * m.lora_delta("a", node) - m.lora_delta("b", node))

    change = {x: -product(factors["b"], x, 3.0) for x in (Q, O)}
    change[Q] = change[Q] + 0.7 * product(factors["a"], Q, 3.0)
    assert total.keys() == {f"{Q}.weight", f"{O}.weight"}
    for module, expected in change.items():
        torch.testing.assert_close(total[f"{module}.weight"], expected, rtol=1e-6, atol=1e-6)


def test_values_by_block_are_those_of_the_base(base: Base, adapter: Callable[..., str]):
    factors = lora(Q, "model.layers.1.q_proj")
    adapter("lora", factors)
    node = m.model("base")
    alpha = {"model.layers.1.*": 0.0, "default": 1.0}

    result = m.merge(m.add_difference(node, m.lora_delta("lora", node), alpha=alpha))

    assert_changes(dict(result), base, {f"{Q}.weight": product(factors, Q, 3.0)})


def test_a_tied_base_gets_an_output_layer_where_that_is_asked_for(
    base: Base, adapter: Callable[..., str], tmp_path: Path
):
    save_file(
        {k: v for k, v in base.items() if k != "lm_head.weight"}, tmp_path / "base" / "model.safetensors"
    )
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace("false", "true"))
    factors = lora(HEAD)
    adapter("head", factors)
    inner = f"{PREFIX}model.embed_tokens."
    rows = {f"{inner}lora_embedding_A": rand(2, 20), f"{inner}lora_embedding_B": rand(6, 2)}
    adapter("rows", rows)

    with pytest.raises(m.CheckpointError, match=r"it changes lm_head, and base has no such .* on_tied=untie"):
        merged("head")
    with pytest.raises(
        m.CheckpointError, match=r"it changes model\.embed_tokens\.weight, which base uses as"
    ):
        merged("rows")
    untied = EngineOptions(on_tied="untie")
    embedding = base["model.embed_tokens.weight"]
    head = merged("head", untied)
    torch.testing.assert_close(head["lm_head.weight"], embedding + product(factors, HEAD, 3.0))
    assert torch.equal(head["model.embed_tokens.weight"], embedding)
    assert torch.equal(merged("rows", untied)["lm_head.weight"], embedding)


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.decoder.embed_tokens", "lm_head"),
        ("model.language_model.embed_tokens", "lm_head"),
        ("language_model.model.embed_tokens", "language_model.lm_head"),
        ("gpt_neox.embed_in", "embed_out"),
    ],
)
def test_a_tied_base_of_any_family_gets_an_output_layer(
    embedding: str, head: str, adapter: Callable[..., str], tmp_path: Path
):
    table, down, up = rand(20, 6), rand(2, 6), rand(20, 2)
    (tmp_path / "base").mkdir()
    save_file({f"{embedding}.weight": table}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text('{"architectures": ["ToyForCausalLM"]}')
    adapter("head", {f"{PREFIX}{head}.lora_A.weight": down, f"{PREFIX}{head}.lora_B.weight": up})

    with pytest.raises(m.CheckpointError, match=r"Where it is tied, on_tied=untie gives it an output layer"):
        merged("head")
    result = merged("head", EngineOptions(on_tied="untie"))

    assert torch.equal(result[f"{embedding}.weight"], table)
    torch.testing.assert_close(result[f"{head}.weight"], table + 3.0 * up @ down)


def test_no_message_asks_for_what_is_set(base: Base, adapter: Callable[..., str], tmp_path: Path):
    body = {
        key: tensor
        for key, tensor in base.items()
        if key not in (f"{HEAD}.weight", "model.embed_tokens.weight")
    }
    save_file(body, tmp_path / "base" / "model.safetensors")
    adapter("head", lora(HEAD))

    with pytest.raises(m.CheckpointError, match="it changes lm_head, and base has no such tensors") as raised:
        merged("head", EngineOptions(on_tied="untie"))

    assert "on_tied" not in str(raised.value)


def test_a_base_is_tied_where_its_config_does_not_say(
    base: Base, adapter: Callable[..., str], tmp_path: Path
):
    """The config of GPT-2 on the hub has no such entry, and transformers reads it as true."""
    del base["lm_head.weight"]
    save_file(base, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text('{"architectures": ["ToyForCausalLM"]}')
    inner = f"{PREFIX}model.embed_tokens."
    adapter("rows", {f"{inner}lora_embedding_A": rand(2, 20), f"{inner}lora_embedding_B": rand(6, 2)})

    with pytest.raises(m.CheckpointError, match=r"which base uses as its output layer, too \(it is tied\)"):
        merged("rows")


@pytest.mark.parametrize("magnitude", [0.0, 2.0])
def test_an_output_of_zeros_stays_zeros_with_magnitudes(
    magnitude: float, base: Base, adapter: Callable[..., str], tmp_path: Path
):
    """As from a LoRA file; PEFT 0.21 divides by the norm, and gives NaN."""
    base[f"{Q}.weight"][3] = 0
    save_file(base, tmp_path / "base" / "model.safetensors")
    factors = lora(Q)
    factors[f"{PREFIX}{Q}.lora_B.weight"][3] = 0
    magnitudes = torch.full((8,), magnitude)
    adapter("dora", factors | {f"{PREFIX}{Q}.lora_magnitude_vector": magnitudes}, use_dora=True)

    result = merged("dora")[f"{Q}.weight"]

    assert torch.equal(result[3], torch.zeros(6))
    torch.testing.assert_close(result[4].norm(), torch.tensor(magnitude))


def test_a_merged_adapter_is_a_folder_like_its_base(base: Base, adapter: Callable[..., str], tmp_path: Path):
    adapter("lora", lora(Q))

    m.merge(m.weighted_sum("base", "lora", alpha=1.0), tmp_path / "whole")

    assert (tmp_path / "whole" / "config.json").exists()
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == SHAPES.keys()


@pytest.mark.parametrize("method", [m.knots, m.tsv_m, m.iso_c])
def test_adapters_are_merged_in_their_subspaces_like_the_models_that_they_make(
    method: Callable[..., m.Node], base: Base, adapter: Callable[..., str], tmp_path: Path
):
    names = [adapter(f"lora{seed}", lora(Q, O, seed=seed)) for seed in (1, 2, 3)]
    for name in names:
        save_file(merged(name), tmp_path / f"{name}.safetensors")
    options = EngineOptions(compute_dtype=torch.float64)

    of_adapters = m.merge(method("base", *names, scale=0.7), options=options)
    of_models = m.merge(
        method("base", *(f"{name}.safetensors" for name in names), scale=0.7), options=options
    )

    for key in base:
        torch.testing.assert_close(of_adapters[key], of_models[key], rtol=1e-5, atol=1e-5, msg=key)
    assert not torch.equal(of_adapters[f"{Q}.weight"], base[f"{Q}.weight"])

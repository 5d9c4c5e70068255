"""What can be exchanged in a network: its rules, random orders, matching, and balanced attention."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from state_dicts import StateDict, contents
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from toy_networks import ATTENTION, MLP, drawn_model, tensors
from written import hash_of

import mecha_exp as m
from mecha_exp.architectures import (
    AxisSlice,
    ModelConfig,
    Symmetry,
    from_yaml,
    get_all,
    linked,
    register,
    resolve,
    to_yaml,
)
from mecha_exp.errors import ConfigError
from mecha_exp.methods.symmetries import balanced, drawn, permuted

GOLDEN = Path(__file__).parent / "golden" / "sd-mecha-symmetries.safetensors"
EXACT = m.EngineOptions(compute_dtype=torch.float64, workers=2)


@pytest.fixture(autouse=True)
def known(registries):
    """The configs of the networks here, for one test each."""
    register(MLP)
    register(ATTENTION)


def mlp(model: StateDict, x: Tensor) -> Tensor:
    x = x @ model["0.weight"].mT + model.get("0.bias", torch.tensor(0.0))
    x = silu(x * model["1.weight"] + model.get("1.bias", torch.tensor(0.0)))
    return silu(x @ model["2.weight"].mT + model["2.bias"]) @ model["3.weight"].mT


def attend(q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (-1, head)).transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


def attention(model: StateDict, x: Tensor) -> Tensor:
    for layer in "01":
        q, k, v = (x @ model[f"{layer}.qkv.weight"].mT + model[f"{layer}.qkv.bias"]).chunk(3, -1)
        x = x + attend(q, k, v, head=4) @ model[f"{layer}.out.weight"].mT
    return x


NETWORKS: dict[str, tuple[ModelConfig, Callable[[StateDict, Tensor], Tensor], int]] = {
    "mlp": (MLP, mlp, 5),
    "attention": (ATTENTION, attention, 8),
}


def merged(recipe: m.Node) -> StateDict:
    return m.merge(recipe, options=EXACT)


# permutations


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_network_of_permuted_units_computes_the_same(name, seed):
    config, network, inputs = NETWORKS[name]
    model = drawn_model(config, 1)
    x = torch.randn(7, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    moved = merged(m.randperm(model, seed=seed))

    assert any(not torch.equal(moved[key], model[key]) for key in model)
    torch.testing.assert_close(network(moved, x), network(model, x))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", range(4))
def test_matching_takes_a_random_permutation_back_byte_for_byte(name, seed):
    model = drawn_model(NETWORKS[name][0], 3, torch.float16)
    moved = m.merge(m.randperm(model, seed=seed))

    found = m.merge(m.rebasin(moved, model))

    assert contents(moved) != contents(model)
    assert contents(found) == contents(model)


@pytest.mark.parametrize("name", NETWORKS)
def test_of_two_networks_one_is_brought_nearer_to_the_other_and_computes_the_same(name):
    config, network, inputs = NETWORKS[name]
    model, reference = (drawn_model(config, seed) for seed in (4, 5))
    x = torch.randn(7, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    found = merged(m.rebasin(a=model, ref=reference, iters=10))

    def apart(one: StateDict) -> float:
        return sum(float((one[key] - reference[key]).square().sum()) for key in reference)

    assert apart(found) < apart(model)
    assert apart(found) < min(apart(merged(m.randperm(model, seed=seed))) for seed in range(5))
    torch.testing.assert_close(network(found, x), network(model, x))
    assert contents(merged(m.rebasin(found, reference))) == contents(found)


def test_more_rounds_are_better_where_layers_share_a_tensor():
    model, reference = drawn_model(MLP, 18), drawn_model(MLP, 118)

    def likeness(rounds: int) -> float:
        found = merged(m.rebasin(model, reference, iters=rounds))
        return sum(float((found[key] * reference[key]).sum()) for key in reference)

    assert likeness(1) < likeness(2) < likeness(10) == likeness(100)


def test_a_layer_alone_is_matched_in_the_best_of_all_orders():
    config = register(
        from_yaml("""
identifier: layer-test
components:
  layer:
    keys: {in.weight: [5, 3], in.bias: [5], out.weight: [2, 5]}
    symmetries: {"": [{rows: "in.{weight,bias}", columns: out.weight}]}
""")
    )
    model, reference = drawn_model(config, 8), drawn_model(config, 9)

    def ordered(order: tuple[int, ...]) -> StateDict:
        rows = list(order)
        return {
            "in.weight": model["in.weight"][rows],
            "in.bias": model["in.bias"][rows],
            "out.weight": model["out.weight"][:, rows],
        }

    def likeness(one: StateDict) -> float:
        return sum(float((one[key] * reference[key]).sum()) for key in reference)

    best = max(map(ordered, permutations(range(5))), key=likeness)
    assert contents(merged(m.rebasin(model, reference))) == contents(best)


def test_a_model_is_in_its_own_order_already_even_where_units_are_equal():
    model = {key: torch.ones_like(x) for key, x in drawn_model(MLP, 0).items()}
    other = drawn_model(MLP, 1)

    assert contents(merged(m.rebasin(model, model))) == contents(model)
    assert contents(merged(m.rebasin(other, other))) == contents(other)


def test_the_order_is_a_matter_of_seed_and_name_not_of_workers():
    model = drawn_model(ATTENTION, 1)

    one, again = (m.merge(m.randperm(model, seed=3), options=replace(EXACT, workers=n)) for n in (1, 3))

    assert contents(one) == contents(again)
    assert contents(one) != contents(merged(m.randperm(model, seed=4)))
    assert contents(merged(m.randperm(model))) == contents(merged(m.randperm(model, seed=0)))
    assert not torch.equal(one["0.qkv.bias"].argsort(), one["1.qkv.bias"].argsort())


def test_tensors_keep_their_dtypes_each_its_own():
    model = drawn_model(MLP, 2, torch.float16)
    model["2.weight"] = model["2.weight"].to(torch.bfloat16)

    moved = m.merge(m.randperm(model))

    assert {key: x.dtype for key, x in moved.items()} == {key: x.dtype for key, x in model.items()}


def test_what_the_reference_lacks_moves_with_the_rest():
    model = drawn_model(MLP, 2)
    reference = dict(model)
    del reference["0.bias"], reference["1.bias"]

    found = merged(m.rebasin(m.randperm(model, seed=1), m.model(reference, "chain-test")))

    assert contents(found) == contents(model)


def test_a_key_that_may_be_missing_is_no_hindrance():
    model = drawn_model(MLP, 2)
    del model["0.bias"], model["1.bias"]
    x = torch.ones(1, 5, dtype=torch.float64)

    moved = merged(m.randperm(m.model(model, "chain-test")))

    assert moved.keys() == model.keys()
    assert not torch.equal(moved["0.weight"], model["0.weight"])
    torch.testing.assert_close(mlp(moved, x), mlp(model, x))


def test_layers_are_matched_in_a_recipe_from_text_and_below_other_methods():
    a, b = drawn_model(MLP, 1), drawn_model(MLP, 2)
    recipe = m.weighted_sum(m.rebasin("a.safetensors", "b.safetensors"), "b.safetensors")

    assert m.deserialize(m.serialize(recipe)) is recipe
    assert contents(merged(m.weighted_sum(m.rebasin(a, b), b))) == contents(
        merged(m.weighted_sum(merged(m.rebasin(a, b)), b))
    )


def test_a_merge_is_permuted_like_a_file():
    a, b = drawn_model(MLP, 1), drawn_model(MLP, 2)
    mean = merged(m.weighted_sum(a, b, alpha=0.5))

    assert contents(merged(m.randperm(m.weighted_sum(a, b, alpha=0.5), seed=1))) == contents(
        merged(m.randperm(mean, seed=1))
    )


@pytest.mark.parametrize("call", [m.randperm, lambda a: m.rebasin(a, a)])
def test_a_model_of_which_nothing_is_known_is_an_error_that_says_where_to_write_it(call):
    with pytest.raises(m.RecipeError, match=r"'structural' names no units .*`symmetries`: see docs/model-c"):
        m.merge(call({"some.weight": torch.ones(2, 2)}))


def test_a_network_without_attention_has_none_to_balance():
    with pytest.raises(m.RecipeError, match=r"balance_attention: .*'chain-test' names no heads of attention"):
        m.merge(m.balance_attention(drawn_model(MLP, 1)))


# attention


def energies(model: StateDict, layer: str, head: int = 4) -> list[Tensor]:
    """q q^T, k k^T, v v^T and o^T o of each head."""
    q, k, v = torch.cat([model[f"{layer}.qkv.weight"], model[f"{layer}.qkv.bias"][:, None]], 1).chunk(3)
    units = (x.unflatten(0, (-1, head)) for x in (q, k, v, model[f"{layer}.out.weight"].mT))
    return [x @ x.mT for x in units]


def test_balanced_attention_has_the_same_energies_on_both_sides_and_computes_the_same():
    model = drawn_model(ATTENTION, 1)
    x = torch.randn(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    made = merged(m.balance_attention(a=model))

    for layer in "01":
        q, k, v, o = energies(made, layer)
        torch.testing.assert_close(q, k, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(v, o, rtol=1e-3, atol=1e-4)
        assert torch.equal(made[f"{layer}.norm.weight"], model[f"{layer}.norm.weight"])
    torch.testing.assert_close(attention(made, x), attention(model, x))


def test_at_its_ends_the_energies_stay_or_are_exchanged():
    model = drawn_model(ATTENTION, 1)

    made = merged(m.balance_attention(model, alpha=1.0))

    assert contents(merged(m.balance_attention(model, alpha=0))) == contents(model)
    q, k, v, o = energies(model, "0")
    torch.testing.assert_close(energies(made, "0"), [k, q, o, v], rtol=1e-3, atol=1e-4)


def test_numbers_may_differ_by_block():
    model = drawn_model(ATTENTION, 1)

    made = merged(m.balance_attention(model, alpha={"0": 1.0, "default": 0.0}))
    moved = merged(m.randperm(model, seed={"0": 5, "default": 0}))

    expected = {
        **model,
        **{k: x for k, x in merged(m.balance_attention(model, alpha=1.0)).items() if k[0] == "0"},
    }
    assert contents(made) == contents(expected)
    fifth, zeroth = (merged(m.randperm(model, seed=seed)) for seed in (5, 0))
    assert contents(moved) == contents({k: (fifth if k[0] == "0" else zeroth)[k] for k in model})


def test_a_dead_head_is_finite():
    model = {key: torch.zeros_like(x) for key, x in drawn_model(ATTENTION, 1).items()}

    assert all(torch.equal(x, torch.zeros_like(x)) for x in merged(m.balance_attention(model)).values())


def test_balanced_attention_with_alpha_1_is_that_of_sd_mecha():
    golden = load_file(GOLDEN)
    model = {key.removeprefix("in."): x for key, x in golden.items() if key.startswith("in.")}
    balance = Symmetry(
        2, 4, ((AxisSlice("q", 0, 0), AxisSlice("q.bias", 0, 0)), (AxisSlice("k", 0, 0),)), linear=True
    )

    made = balanced(model, [balance], alpha=1.0)

    near = {"rtol": 1e-5, "atol": 1e-6}  # its 1e-6 lies beside the diagonals of all heads but the first
    q = torch.cat([made["q"], made["q.bias"][:, None]], 1)
    torch.testing.assert_close(q, golden["balanced.q"], **near)
    torch.testing.assert_close(made["k"], golden["balanced.k"], **near)


def test_matching_finds_what_sd_mecha_finds():
    golden = load_file(GOLDEN)
    model, reference, found = (
        {key.removeprefix(start): x for key, x in golden.items() if key.startswith(start)}
        for start in ("a.", "ref.", "found.")
    )

    assert contents(
        merged(m.rebasin(m.model(model, "chain-test"), m.model(reference, "chain-test")))
    ) == contents(found)


# the rules of the built-in configs


@pytest.mark.parametrize("config", get_all(), ids=lambda config: config.identifier)
def test_the_symmetries_of_a_built_in_config_fit_its_keys(config):
    for part in config.parts:
        for rule in part.all_symmetries:
            keys = config.components()[part.name]
            for symmetry in rule.symmetries(part.full_name, keys, part.all_sizes(config.sizes)):
                for key, axis, start in symmetry.places:
                    assert 0 <= start <= keys[key].shape[axis] - symmetry.heads * symmetry.width


def test_of_a_layout_of_other_sizes_the_heads_are_left_out_if_they_do_not_fit():
    text = "identifier: small-text\ncomponents: {clip: {layout: clip_hf, sizes: {layers: 1, hidden: 40}}}"

    symmetries = from_yaml(text).symmetries()

    assert [key.split(".")[-2] for s in symmetries for key in s.keys] == ["fc1", "fc1", "fc2"]


def test_sdxl_has_the_groups_of_sd_mecha_with_heads_of_64_and_those_of_the_vae():
    symmetries = resolve("sdxl-sgm").symmetries()

    groups = [{key for s in group for key in s.keys} for group in linked(symmetries)]
    elsewhere = [group for group in groups if not min(group).startswith("first_stage_model.")]
    with safe_open(GOLDEN, "pt") as golden:
        assert hash_of(elsewhere) == golden.metadata()["groups of sdxl-sgm"]
    assert len(elsewhere) == len(groups) - 4
    heads = [s for s in symmetries if s.linear]
    assert len(symmetries) - len(heads) == 12 + 32 + 2 + 70  # text encoders, embeddings, transformer blocks
    assert len(heads) == 2 * (12 + 32 + 2 * 70 + 2)
    assert {s.width for s in heads if "first_stage" not in s.keys[0]} == {64}
    assert {s.width for s in heads if "first_stage" in s.keys[0]} == {512}


def of_block(config: str, begin: str, change: Callable[..., StateDict]) -> tuple[StateDict, StateDict]:
    """A part of a real architecture before and after a change, without the beginning of its names."""
    known = resolve(config)
    symmetries = [s for s in known.symmetries() if s.keys[0].startswith(begin)]
    model = tensors({k: i.shape for k, i in known.keys().items() if k.startswith(begin)}, 1, torch.float32)
    changed = change(model, symmetries)
    assert sum(not torch.equal(changed[key], model[key]) for key in model) >= 3
    return tuple({key.removeprefix(begin): x for key, x in one.items()} for one in (model, changed))


def moved(model: StateDict, symmetries: list[Symmetry]) -> StateDict:
    return permuted(model, {symmetry: drawn(symmetry, 0) for symmetry in symmetries})


def turned(model: StateDict, symmetries: list[Symmetry]) -> StateDict:
    return balanced(model, [symmetry for symmetry in symmetries if symmetry.linear], 0.5)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("change", [moved, turned])
def test_a_transformer_block_of_the_unet_computes_the_same(change):
    begin = "model.diffusion_model.input_blocks.4.1.transformer_blocks.0."
    x, context = torch.randn(2, 9, 2048, generator=torch.Generator().manual_seed(0))

    def block(w: StateDict) -> Tensor:
        q, k, v = (x[:, :640] @ w[f"attn1.to_{n}.weight"].mT for n in "qkv")
        y = attend(q, k, v, head=64) @ w["attn1.to_out.0.weight"].mT
        k, v = (context @ w[f"attn2.to_{n}.weight"].mT for n in "kv")
        y = y + attend(y @ w["attn2.to_q.weight"].mT, k, v, head=64) @ w["attn2.to_out.0.weight"].mT
        value, gate = (y @ w["ff.net.0.proj.weight"].mT + w["ff.net.0.proj.bias"]).chunk(2, -1)
        return (value * gelu(gate)) @ w["ff.net.2.weight"].mT

    before, after = of_block("sdxl-sgm", begin, change)
    close(block(after), block(before))


@pytest.mark.parametrize("change", [moved, turned])
def test_a_layer_of_the_text_encoders_computes_the_same(change):
    x = torch.randn(9, 1280, generator=torch.Generator().manual_seed(0))

    def small(w: StateDict) -> Tensor:
        q, k, v = (
            x[:, :768] @ w[f"self_attn.{n}_proj.weight"].mT + w[f"self_attn.{n}_proj.bias"] for n in "qkv"
        )
        y = attend(q, k, v, head=64) @ w["self_attn.out_proj.weight"].mT
        return gelu(y @ w["mlp.fc1.weight"].mT + w["mlp.fc1.bias"]) @ w["mlp.fc2.weight"].mT

    def large(w: StateDict) -> Tensor:
        q, k, v = (x @ w["attn.in_proj_weight"].mT + w["attn.in_proj_bias"]).chunk(3, -1)
        y = attend(q, k, v, head=64) @ w["attn.out_proj.weight"].mT
        return gelu(y @ w["mlp.c_fc.weight"].mT + w["mlp.c_fc.bias"]) @ w["mlp.c_proj.weight"].mT

    begin = "conditioner.embedders.0.transformer.text_model.encoder.layers.3."
    before, after = of_block("sdxl-sgm", begin, change)
    close(small(after), small(before))
    before, after = of_block("sdxl-sgm", "conditioner.embedders.1.model.transformer.resblocks.7.", change)
    close(large(after), large(before))


@pytest.mark.parametrize("change", [moved, turned])
def test_the_attention_of_the_autoencoder_computes_the_same(change):
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0))

    def block(w: StateDict) -> Tensor:
        q, k, v = (x @ w[f"{n}.weight"].flatten(1).mT + w[f"{n}.bias"] for n in "qkv")
        return attend(q, k, v, head=512) @ w["proj_out.weight"].flatten(1).mT

    before, after = of_block("sdxl-sgm", "first_stage_model.decoder.mid.attn_1.", change)
    close(block(after), block(before))


# rules


def test_symmetries_that_share_a_tensor_are_in_one_group():
    groups = linked(ATTENTION.symmetries())

    assert [{key[0] for s in group for key in s.keys} for group in groups] == [{"0"}, {"1"}]
    assert [len(group) for group in groups] == [2, 2]
    assert len(linked(MLP.symmetries())) == 1


def test_symmetries_survive_yaml():
    for config in (MLP, ATTENTION):
        assert from_yaml(to_yaml(config)).symmetries() == config.symmetries()


RULES = "{rows: x.weight, columns: y.weight}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{rows: x.wight, columns: y.weight}", r"there is no key 'x\.wight'\. Did you mean 'x\.weight'"),
        ("{rows: x.weight, columns: z.weight}", r"'z\.weight' of shape \[6\] has no columns"),
        ("{rows: x.weight 1/4, columns: y.weight}", r"'x\.weight' of shape \[6, 4\] has no 4 equal parts"),
        ("{rows: x.weight 1/2, columns: y.weight}", r"different numbers of units: \[3, 6\]"),
        ('{rows: "{x,y}.weight"}', r"the tensors of '\{x,y\}\.weight' have different numbers of units"),
        ("{head: 4, rows: x.weight, columns: y.weight}", "6 units are not a whole number of heads of 4"),
        ("{rows: x.weight 3/2, columns: y.weight}", "there is no part 3 of 2"),
        ("{head: 0, rows: x.weight, columns: y.weight}", r"\.head: expected a positive number, got 0"),
        ("{head: 2, rows: x.weight}", "a rule with 'head' has two sides, and this one has 1"),
        ("{}", "it needs 'rows' or 'columns'"),
        ("{rowz: x.weight}", r"rowz: unknown field.*Did you mean 'rows'"),
        ('{rows: "{x"}', "never closed"),
        ('{rows: "{0..layers-1}.weight"}', "there is no size 'layers'"),
    ],
)
def test_a_rule_that_is_wrong_is_an_error_that_says_where(wrong, message):
    text = f"""
identifier: wrong-test
components:
  one:
    keys: {{x.weight: [6, 4], y.weight: [4, 6], z.weight: [6]}}
    symmetries: {{"": [{RULES}, {wrong}]}}
"""
    with pytest.raises(ConfigError, match=rf"components\.one\.symmetries\['.*{message}"):
        register(from_yaml(text))


def test_a_rule_that_is_no_list_is_an_error():
    with pytest.raises(ConfigError, match="expected a list of rules such as"):
        from_yaml(
            "{identifier: wrong-test, components: {one: {keys: {x: [2]}, symmetries: {'': {rows: x}}}}}"
        )

"""Adapters merged into one adapter: the sum of what they add, exactly or at a rank with its error."""

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outcome import Outcome
from peft_tensors import O, Q, lora, rand
from safetensors.torch import load_file
from torch import Tensor

import mecha_exp as m
from mecha_exp.peft.sums import Sum, Term

Base = dict[str, Tensor]
Adapter = Callable[..., str]
PREFIX = "base_model.model."


@pytest.fixture
def adapters(base: Base, adapter: Adapter) -> None:
    """Three adapters of different ranks and scales; the second has one module more."""
    adapter("a", lora(Q))
    adapter("b", lora(Q, O, rank=3, seed=7), r=3, lora_alpha=9, use_rslora=True)
    inner = f"{PREFIX}model.embed_tokens.lora_embedding"
    rows = {f"{inner}_A": rand(2, 20), f"{inner}_B": rand(6, 2)}
    conv = {f"{PREFIX}model.conv.lora_A.weight": rand(2, 6, 3, 3)}
    conv[f"{PREFIX}model.conv.lora_B.weight"] = rand(4, 2, 1, 1)
    adapter("c", rows | conv | lora(Q, seed=50), lora_alpha=2)


def difference(*weighted: tuple[float, str]) -> Base:
    """The sum of what adapters add to the base, by the path that merges models."""
    base = m.model("base")
    (weight, name), *others = weighted
    node = weight * m.lora_delta(name, base)
    for weight, name in others:
        node = m.add_difference(node, m.lora_delta(name, base), alpha=weight)
    return dict(m.merge(node, merge_dtype=torch.float64))


WEIGHTED = ((0.7, "a"), (-0.3, "b"), (1.5, "c"))
NAMES, WEIGHTS = [name for _, name in WEIGHTED], [weight for weight, _ in WEIGHTED]


def test_concatenated_factors_add_what_the_adapters_add(adapters: None):
    merged = m.merge_adapters(NAMES, "all", WEIGHTS)

    assert merged.error == 0 and merged.ranks[Q] == 2 + 3 + 2
    expected, made = difference(*WEIGHTED), difference((1.0, "all"))
    assert expected.keys() == made.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(made[key], tensor, rtol=1e-6, atol=1e-6)


def test_a_rank_gives_the_nearest_and_says_what_it_costs(adapters: None):
    merged = m.merge_adapters(NAMES, "low", WEIGHTS, rank=2)

    expected, made = difference(*WEIGHTED), difference((1.0, "low"))
    squared = {key: (made[key] - expected[key]).square().sum() for key in expected}
    singular = torch.linalg.svdvals(expected[f"{Q}.weight"].double())
    assert merged.ranks[Q] == 2
    assert merged.errors[Q] == pytest.approx(float(singular[2:].norm() / singular.norm()), rel=1e-5)
    whole = sum(tensor.square().sum() for tensor in expected.values())
    assert merged.error == pytest.approx(float((sum(squared.values()) / whole).sqrt()), rel=1e-5)
    assert merged.error == pytest.approx(merged.error_at[2])
    assert merged.errors["model.conv"] == pytest.approx(0, abs=1e-7)


def test_a_high_rank_costs_nothing(adapters: None):
    merged = m.merge_adapters(NAMES, "high", WEIGHTS, rank=64)

    assert merged.error == pytest.approx(0, abs=1e-12)
    expected, made = difference(*WEIGHTED), difference((1.0, "high"))
    for key, tensor in expected.items():
        torch.testing.assert_close(made[key], tensor, rtol=1e-6, atol=1e-6)


def test_the_configuration_says_the_rank_of_each_module(adapters: None):
    m.merge_adapters(["a", "b"], "both", 0.5)

    config = json.loads(Path("both/adapter_config.json").read_text())
    assert config["target_modules"] == [O, Q]
    ranks = {config["r"], *config["rank_pattern"].values()}
    assert ranks == {3, 5}
    assert config["alpha_pattern"] == config["rank_pattern"] and config["lora_alpha"] == config["r"]
    assert config["base_model_name_or_path"] == "org/base"
    assert all(
        tensor.dtype == torch.float32 for tensor in load_file("both/adapter_model.safetensors").values()
    )


@given(
    weights=st.lists(st.floats(-2, 2), min_size=1, max_size=4),
    ranks=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    kept=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_sums_of_products(weights: list[float], ranks: list[int], kept: int, seed: int):
    terms = [
        Term(w, rand(r, 7, seed=seed + n).double(), rand(5, r, seed=seed - n).double())
        for n, (w, r) in enumerate(zip(weights, ranks, strict=False))
    ]
    exact = sum(term.weight * term.up @ term.down for term in terms)
    made = Sum(terms)

    down, up = made.concatenated()
    torch.testing.assert_close(up @ down, exact)
    down, up = made.nearest(kept)
    left_out = torch.linalg.svdvals(exact)[kept:].square().sum()
    torch.testing.assert_close((up @ down - exact).square().sum(), left_out)
    assert made.squared_error(kept) == pytest.approx(float(left_out), abs=1e-9)
    assert made.squared_norm == pytest.approx(float(exact.square().sum()), abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a", "b"], "out", [1.0]), "weights: 1 are given for 2 adapters"),
        ((["a"], "out", float("inf")), "weights: expected finite numbers, got inf"),
        ((["a"], "out", 1.0, 0), "rank: expected a whole number of at least 1, or none, got 0"),
        (([], "out"), "merge_adapters: name one adapter at least"),
        ((["a"], "base"), "base is there and is not an adapter: name another folder"),
        ((["lokr"], "out"), "lokr: a sum of LOKR adapters has no factors of that form"),
        ((["base"], "out"), "base is not the folder of an adapter: it has no adapter_config.json"),
        (
            (["dora"], "out"),
            f"dora: {Q}.lora_magnitude_vector depend on the base, so that no sum of factors has",
        ),
        (
            (["a", "wide"], "out"),
            f"{Q} has other sizes in a than in wide: these adapters are for different bases",
        ),
        (
            (["wrong"], "out"),
            f"wrong: its configuration says rank 5 for {Q}, and its factors are [2, 6] and [8, 2]",
        ),
    ],
)
def test_what_cannot_be_merged_is_an_error(
    adapters: None, adapter: Adapter, arguments: tuple[object, ...], message: str
):
    adapter("dora", lora(Q) | {f"{PREFIX}{Q}.lora_magnitude_vector": rand(8).abs()}, use_dora=True)
    factors = {f"{PREFIX}{Q}.lora_A.weight": rand(2, 9), f"{PREFIX}{Q}.lora_B.weight": rand(8, 2)}
    adapter("wide", factors)
    adapter("wrong", lora(Q), r=5)
    kron = {f"{PREFIX}{Q}.lokr_w1": rand(2, 3), f"{PREFIX}{Q}.lokr_w2": rand(4, 2)}
    adapter("lokr", kron, peft_type="LOKR")

    with pytest.raises(m.MechaError, match=re.escape(message)):
        m.merge_adapters(*arguments)  # type: ignore[arg-type]
    assert not Path("out").exists()


def test_the_verb_says_what_a_rank_costs(adapters: None, app: Callable[..., Outcome], tmp_path: Path):
    words = ("adapters", "a", "b", "--weights", "0.7", "-0.3", "-o", "both")
    exact, cut = (app(*words, *more, cwd=tmp_path) for more in ((), ("--rank", "1")))

    assert exact.status == cut.status == 0, exact.err + cut.err
    assert "both: 2 modules of rank 3 to 5, relative error 0" in exact.out
    assert re.search(r"both: 2 modules of rank 1, relative error 0\.\d+\n", cut.out)
    assert f"the largest: {Q}" in cut.out or f"the largest: {O}" in cut.out
    assert difference((1.0, "both")).keys() == {f"{Q}.weight", f"{O}.weight"}


def test_different_bases_are_named(adapter: Adapter, app: Callable[..., Outcome], tmp_path: Path):
    adapter("mine", lora(Q), base_model_name_or_path="org/one")
    adapter("other", lora(Q, seed=3), base_model_name_or_path="two")

    outcome = app("adapters", "mine", "other", "-o", "both", cwd=tmp_path)

    assert outcome.status == 0, outcome.err
    assert "warning: the adapters name different bases: org/one, two. Are these one model?" in outcome.out
    assert m.merge_adapters(["mine", "mine"], "twice").bases == ("org/one",)


def test_a_file_that_cannot_be_written_leaves_nothing(adapters: None, tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # bytes of a file, as on a full disk
    try:
        with pytest.raises(m.CheckpointError, match=r"both cannot be written: .*too large"):
            m.merge_adapters(["a", "b"], "both")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not [path for path in tmp_path.rglob("*") if "both" in path.name]


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize(
    ("factor", "weight", "message"),
    [
        (float("nan"), 1.0, r"odd: .*lora_A\.weight has values that are not finite"),
        (1.0, 1e300, r"sum: .*lora_B\.weight would be too large for float32"),
    ],
)
def test_what_is_not_finite_is_refused_before_anything_is_written(
    adapter: Adapter, tmp_path: Path, rank: int | None, factor: float, weight: float, message: str
):
    tensors = lora(Q)
    tensors[f"{PREFIX}{Q}.lora_A.weight"] *= factor
    adapter("odd", tensors)

    with pytest.raises(m.CheckpointError, match=message):
        m.merge_adapters(["odd"], "sum", weight, rank)
    assert not (tmp_path / "sum").exists()

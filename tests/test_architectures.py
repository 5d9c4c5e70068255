"""Model configs: patterns, what a config says of its keys, the YAML, and what a file is taken for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mecha_exp.architectures import (
    KeyInfo,
    ModelConfig,
    StructuralConfig,
    detect,
    from_yaml,
    infer_blocks,
    resolve,
    to_yaml,
)
from mecha_exp.architectures.patterns import Pattern
from mecha_exp.errors import ConfigError

WORDS = st.text("abc.", min_size=1, max_size=4)


@given(st.lists(st.one_of(WORDS, st.lists(WORDS, min_size=2, max_size=3)), max_size=4))
def test_a_pattern_stands_for_every_combination_the_last_group_changing_fastest(parts):
    text = "".join(part if isinstance(part, str) else "{" + ",".join(part) + "}" for part in parts)

    expected = [""]
    for part in parts:
        expected = [
            name + option for name in expected for option in ([part] if isinstance(part, str) else part)
        ]

    pattern = Pattern.parse(text)
    assert pattern.expand() == expected
    assert pattern.first() == expected[0]


@given(st.integers(0, 50), st.integers(0, 50))
def test_a_range_has_both_ends_and_may_end_at_a_size(first, length):
    numbers = [f"layer.{n}" for n in range(first, first + length + 1)]

    assert Pattern.parse(f"layer.{{{first}..{first + length}}}").expand() == numbers
    assert Pattern.parse(f"layer.{{{first}..depth-1}}").expand({"depth": first + length + 1}) == numbers


def test_groups_nest_and_zeros_are_kept():
    assert Pattern.parse("{a{0..1},b}").expand() == ["a0", "a1", "b"]
    assert Pattern.parse("IN{09..10}{,x}").expand() == ["IN09", "IN09x", "IN10", "IN10x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.{b", r"has a '\{' at 3 that is never closed"),
        ("a.b}", r"has a '\}' at 4 that closes nothing"),
        ("a.{b}", r"\{b\} is neither alternatives"),
        ("{9..2}", "runs backwards"),
        ("{0..99999999}", "longer than 100,000"),
        ("{0..999}{0..999}", "more than 100,000 names"),
    ],
)
def test_a_pattern_that_is_wrong_is_an_error_that_says_where(text, message):
    with pytest.raises(ConfigError, match=message):
        Pattern.parse(text).expand()


def test_patterns_correspond_group_by_group():
    left = Pattern.parse("input_blocks.{1,2,4}.{0..1}.x")

    assert dict(left.pairs(Pattern.parse("down.{0.a,0.b,1.a}.{r,s}")))["input_blocks.4.0.x"] == "down.1.a.r"
    assert set(dict(left.pairs(Pattern.parse("BASE"))).values()) == {"BASE"}
    with pytest.raises(ConfigError, match=r"do not correspond: groups of \[3, 2\] and of \[2\]"):
        list(left.pairs(Pattern.parse("{a,b}")))


def test_keys_below_numbered_layers_are_a_block_and_others_belong_to_their_module():
    assert infer_blocks(["model.layers.12.attn.q.weight", "model.embed.weight", "scale"]) == {
        "model.layers.12.attn.q.weight": "12",
        "model.embed.weight": "model.embed",
        "scale": "scale",
    }
    assert list(infer_blocks(["encoder.layers.0.w", "decoder.layers.0.w", "m.mid.1.w"]).values()) == [
        "encoder.layers.0",
        "decoder.layers.0",
        "mid.1",
    ]


LLAMA = resolve("llama-hf")
SIZES = {"layers": 5, "hidden": 8, "feed_forward": 12, "queries": 6, "keys": 3, "vocabulary": 100}


def test_a_config_knows_the_component_and_the_block_of_a_key():
    key = "model.layers.31.self_attn.k_proj.weight"

    assert (LLAMA.architecture, LLAMA.implementation) == ("llama", "hf")
    assert LLAMA.keys()[key] == KeyInfo((4096, 4096), "bfloat16")
    assert (LLAMA.component_of(key), LLAMA.block_of(key)) == ("model", "31")
    assert LLAMA.layers() == tuple(str(n) for n in range(32))
    with pytest.raises(ConfigError, match=r"no key 'model.norn.weight'. Did you mean 'model.norm.weight'"):
        LLAMA.block_of("model.norn.weight")
    with pytest.raises(ConfigError, match=r"no block convention 'sd-meca'. Did you mean 'sd-mecha'"):
        LLAMA.blocks("sd-meca")


@given(st.fixed_dictionaries({name: st.integers(1, 40) for name in SIZES}))
def test_depth_and_width_are_found_in_the_file(sizes):
    found = detect(LLAMA.with_sizes(sizes).keys())

    assert found.config == LLAMA.with_sizes(sizes)
    assert found.is_whole
    assert not found.extra


def test_an_unknown_file_has_a_config_of_its_own_keys():
    keys = {name: KeyInfo((2,), "float32") for name in ["m.encoder.0.w", "m.encoder.1.w", "m.head.w"]}

    found = detect(keys)

    assert not found.is_known
    assert list(found.config.components()) == ["encoder", "head"]
    assert found.config.layers() == ("0", "1")
    assert found.config == StructuralConfig(keys) != StructuralConfig({})


def test_a_config_survives_yaml():
    again = from_yaml(to_yaml(LLAMA))

    assert again == LLAMA
    assert again.keys() == LLAMA.keys()
    assert again.blocks() == LLAMA.blocks()


def test_an_unknown_config_is_met_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown model config 'lama-hf'. Did you mean 'llama-hf'"):
        resolve("lama-hf")


def test_configs_with_the_same_identifier_and_sizes_are_equal():
    assert LLAMA.with_sizes(SIZES) == ModelConfig("llama-hf", LLAMA.parts, SIZES) != LLAMA

"""Model configs: patterns, what a config says of its keys, the YAML, and what a file is taken for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mecha_exp.architectures import (
    Component,
    KeyInfo,
    KeyPattern,
    ModelConfig,
    StructuralConfig,
    detect,
    from_yaml,
    get_all,
    infer_blocks,
    register,
    resolve,
    to_yaml,
    views,
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


@settings(max_examples=20, deadline=None)
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


GOOD = """
identifier: toy-one
components:
  body:
    prefix: body.
    keys:
      "layers.{0..2}.weight": [4, 4]
    blocks:
      "layers.{0..2}.*": "{0..2}"
"""


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("toy-one", "Toy", r"identifier: 'Toy' is not 'architecture-implementation'"),
        ("identifier: toy-one", "name: x", r"identifier: it is missing"),
        ("components:", "component:", r"component: unknown field. Did you mean 'components'"),
        ("prefix: body.", "prefx: body.", r"components.body.prefx: unknown field. Did you mean 'prefix'"),
        ("prefix: body.", "prefix: 3", r"components.body.prefix: expected a text, got 3"),
        ("[4, 4]", "4", r"\['layers.\{0..2\}.weight'\]: expected a mapping, got 4"),
        ("[4, 4]", "{dtype: float32}", r"shape: it is missing"),
        ("[4, 4]", "{shape: [4], dtype: flaot32}", r"unknown dtype 'flaot32'. Did you mean 'float32'"),
        ("[4, 4]", "[4, -4]", r"shape: -4 is not a size"),
        ("[4, 4]", "[hidden]", r"shape: there is no size 'hidden'. Add it under 'sizes'"),
        ("[4, 4]", "{shape: [4], optional: maybe}", r"optional: expected true or false, got 'maybe'"),
        ("[4, 4]", "{shape: [4], aliases: x}", r"aliases: expected a list of texts, got 'x'"),
        ("[4, 4]", "{shape: [4], aliases: ['l.{0..1}']}", r"aliases: .* do not correspond"),
        ('"{0..2}"', '"{0..1}"', r"blocks\['layers.\{0..2\}.\*'\]: .* do not correspond"),
        ("{0..2}.weight", "{0..2.weight", r"has a '\{' at 8 that is never closed"),
        ("{0..2}.*", "*.{0..2}", r"'\*' may stand at the end only"),
        ("    prefix: body.", "    layout: vae_lmd", r"there is no layout 'vae_lmd'. Did you mean 'vae_ldm'"),
        (
            "identifier: toy-one",
            "identifier: toy-one\nsizes: {n: 3}",
            r"sizes.n: no shape and no range uses it",
        ),
        ("identifier: toy-one", "identifier: toy-one\nsizes: {N: 0}", r"sizes.N: expected a positive number"),
        (
            "identifier: toy-one",
            "identifier: a-b\nidentifier: a-c",
            r"line 3, column 1: 'identifier' is there twice",
        ),
        ("identifier: toy-one", "identifier: [", r"is not valid YAML: line"),
        ('      "layers.{0..2}.weight": [4, 4]', "", r"needs 'keys', or a 'layout' that has them"),
    ],
)
def test_a_config_that_is_wrong_is_an_error_that_says_where(wrong, right, message):
    assert wrong in GOOD
    from_yaml(GOOD)

    with pytest.raises(ConfigError, match=message):
        from_yaml(GOOD.replace(wrong, right), "toy.yaml")


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError, match=r"(?s)3 problems:.*toy.yaml: idntifier.*identifier: it is.*sizes"):
        from_yaml(GOOD.replace("identifier", "idntifier") + "sizes: {n: 3}", "toy.yaml")


def test_a_key_that_is_there_twice_and_a_block_that_is_missing_are_found():
    twice = from_yaml(GOOD.replace("    blocks:", '      "layers.{1,2}.{weight,bias}": [4]\n    blocks:'))
    with pytest.raises(ConfigError, match=r"'body.layers.1.weight' is there twice"):
        twice.keys()
    without = from_yaml(GOOD.replace("    blocks:", "      head: [4]\n    blocks:"))
    with pytest.raises(ConfigError, match=r"no rule matches 'body.head'"):
        without.blocks()


def test_a_config_of_ones_own_is_found_by_its_name_and_by_its_keys():
    config = register(from_yaml(GOOD.replace("toy-one", "toy-registered")))

    assert resolve("toy-registered") is config
    assert detect(config.keys()).config == config
    assert register(config) is config
    with pytest.raises(ConfigError, match="there is a model config 'sdxl-sgm' already"):
        register(from_yaml(GOOD.replace("toy-one", "sdxl-sgm")))


@pytest.mark.parametrize("config", get_all(), ids=lambda config: config.identifier)
def test_a_built_in_config_is_whole(config):
    keys = config.keys()

    assert detect(keys).config.identifier == config.identifier
    assert from_yaml(to_yaml(config)).keys() == keys
    for convention in config.conventions:
        assert {config.block_of(key, convention) for key in keys} == set(config.blocks(convention))
    assert {config.component_of(key) for key in keys} == set(config.components())


@pytest.mark.parametrize("config", get_all(), ids=lambda config: config.identifier)
def test_a_file_without_what_is_optional_is_the_same_and_one_of_another_shape_is_not(config):
    required = {key: info for key, info in config.keys().items() if not info.optional}
    assert detect(required).config.identifier == config.identifier
    assert detect(required).is_whole

    key = next(iter(required))
    other = {**required, key: required[key]._replace(shape=(*required[key].shape, 7))}
    assert detect(other).config.identifier != config.identifier


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_missing_and_extra_keys_are_named_exactly(data):
    keys = dict(resolve("sdxl-sgm").keys())
    required = [key for key, info in keys.items() if not info.optional]
    missing = data.draw(st.sets(st.sampled_from(required), max_size=20))
    extra = data.draw(st.sets(st.text("xyz", min_size=1), max_size=5))

    left = {key: info for key, info in keys.items() if key not in missing}
    found = detect({**left, **{key: KeyInfo((3,), "float32") for key in extra}})

    assert found.config.identifier == "sdxl-sgm"
    assert set(found.missing) == missing
    assert set(found.extra) == extra


def test_a_part_that_is_absent_is_named_as_a_whole():
    config = resolve("sdxl-sgm")

    found = detect({**config.components()["diffuser"], **config.components()["clip_g"]})

    assert found.absent == ("clip_l", "vae")
    assert found.missing == ()


def test_a_component_says_what_files_may_call_the_first_key_of_each_pattern():
    own = KeyPattern(Pattern.parse("{a,b}.w"), (2,), "float32", aliases=(Pattern.parse("{x,y}.w"),))
    part = Component("p", "model.", (own,), aliases={"model.a.": "old.a."})

    assert part.names_of_first(own) == ("model.a.w", "old.a.w", "model.x.w")
    assert part.beginnings == ((1, ("model.a.w", "old.a.w", "model.x.w")),)


def test_keys_under_other_names_are_known():
    keys = {
        key.removeprefix("model.diffusion_model."): info for key, info in resolve("flux-flux").keys().items()
    }

    found = detect(keys)

    assert found.config.identifier == "flux-flux"
    assert found.renamed["img_in.bias"] == "model.diffusion_model.img_in.bias"


def test_the_conventions_of_projects_differ_in_the_layers_outside_the_blocks():
    config, key = resolve("sdxl-sgm"), "model.diffusion_model.label_emb.0.0.weight"

    assert config.block_of(key) == "BASE"
    assert config.block_of(key, "supermerger") == "IN00"
    assert config.block_of("model.diffusion_model.out.2.weight") == "OUT08"
    assert resolve("sd1-ldm").blocks() == (
        "BASE",
        *(f"IN{i:02}" for i in range(12)),
        "M00",
        *(f"OUT{i:02}" for i in range(12)),
    )


@pytest.mark.parametrize(
    "pair",
    [("sdxl-sgm", "sdxl-diffusers"), ("sd1-ldm", "sd1-diffusers"), ("clip_g-openclip", "clip_g-hf")],
)
def test_a_block_is_the_same_in_every_format(pair):
    ours, theirs = map(resolve, pair)
    for key, view in views(*pair).by_key.items():
        assert theirs.block_of(key) == ours.block_of(view.sources[0]), key
    assert theirs.layers() == ours.layers()

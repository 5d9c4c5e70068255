"""What tells at a glance that a file is not of a config."""

import pytest

from mecha_exp.architectures import (
    AdapterConfig,
    candidates,
    from_yaml,
    get_all,
    get_all_adapters,
    register,
    resolve,
)
from mecha_exp.architectures.keys import KeyInfo
from mecha_exp.architectures.library.prefilter import may_match, outline_of, outlines_of
from mecha_exp.architectures.library.registry import plausible_configs

TINY = """
identifier: tiny-test
components:
  body:
    keys: {"body.{a,b}.weight": [3, 4], "body.bias": [3]}
  head:
    optional: true
    keys: {"head.weight": [2, 3]}
"""


def never():
    pytest.fail("the configs are read")


@pytest.mark.parametrize("name", [config.identifier for config in get_all()])
def test_a_model_is_likely_what_it_is_and_the_others_do_not_fit(name):
    keys = resolve(name).keys()

    likely = plausible_configs(keys)

    assert name in [config.identifier for config in likely]
    everything = candidates(keys, [*get_all(), *get_all_adapters()])
    assert [found.config.identifier for found in candidates(keys)] == [
        found.config.identifier for found in everything
    ]


def test_an_adapter_is_likely_by_the_names_of_its_modules():
    keys = {f"lora_unet_x.{end}": KeyInfo((4, 4), "float16") for end in ("lora_up.weight", "alpha")}

    found = [config for config in plausible_configs(keys) if isinstance(config, AdapterConfig)]

    assert found == [
        config
        for config in get_all_adapters()
        if "lora_unet_" in str(config.names) or config.prefix == "lora"
    ]


def test_what_is_of_no_config_is_like_hardly_any():
    """The head of a language model has nothing that a file must have, so its names tell nothing."""
    likely = {config.identifier for config in plausible_configs({"w": KeyInfo((3,), "float32")})}

    assert likely == {"deepseek-hf", "gpt_oss-hf", "llama-hf", "mixtral-hf", "qwen2_moe-hf", "qwen3_moe-hf"}


def test_a_config_of_the_user_s_own_is_likely_too():
    config = register(from_yaml(TINY))

    assert config in plausible_configs(config.keys())


def test_only_components_that_a_model_must_have_count():
    outline = outline_of(from_yaml(TINY))

    assert may_match({"body.a.weight": KeyInfo((3, 4), "float32")}, outline)
    assert not may_match({"body.a.weight": KeyInfo((3,), "float32")}, outline)
    assert not may_match({"head.weight": KeyInfo((2, 3), "float32")}, outline)


def test_outlines_are_kept_until_a_text_changes(monkeypatch, tmp_path):
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "tiny.yaml"
    text.write_text(TINY)
    config = from_yaml(TINY)
    made = outlines_of([text], lambda: [config])
    keys = {"body.a.weight": KeyInfo((3, 4), "float32")}

    kept = outlines_of([text], never)

    assert list(kept) == list(made) == ["tiny-test"]
    assert may_match(keys, kept["tiny-test"])
    text.write_text(TINY.replace("body.", "trunk."))
    changed = outlines_of([text], lambda: [from_yaml(text.read_text())])
    assert not may_match(keys, changed["tiny-test"])


def test_a_broken_file_of_outlines_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "tiny.yaml"
    text.write_text(TINY)
    outlines_of([text], lambda: [from_yaml(TINY)])
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-5])

    assert list(outlines_of([text], lambda: [from_yaml(TINY)])) == ["tiny-test"]
    assert list(outlines_of([text], never)) == ["tiny-test"]

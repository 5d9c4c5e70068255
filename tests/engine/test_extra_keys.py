"""Keys that a model config does not know: left out with a warning, or an error, or merged like the others."""

import logging

import pytest
import torch
from state_dicts import StateDict

import mecha_exp as m
from mecha_exp import (
    CheckpointError,
    EngineOptions,
    Job,
    merge,
    merge_many,
    model,
    plan,
    weighted_sum,
)
from mecha_exp.architectures import from_yaml, resolve
from mecha_exp.engine.report import About
from mecha_exp.extensions import model_configs

CONFIG = """
identifier: %s
components:
  body:
    prefix: extras_test.
    keys:
      x: {shape: [2], dtype: float32, aliases: [former_x]}
      y: {shape: [2], dtype: float32}
"""
NAME, OTHER = "extras-test", "extras_step-test"
FLOAT8 = torch.float8_e4m3fn
X, Y = "extras_test.x", "extras_test.y"
SAID = "has 1 key that is not in its model config 'extras-test': step"


def family() -> StateDict:
    """A Llama of one layer."""
    sizes = {"layers": 1, "vocabulary": 8, "hidden": 4, "feed_forward": 8, "queries": 4, "keys": 4}
    keys = resolve("llama-hf").with_sizes(sizes).keys()
    return {key: torch.ones(info.shape) for key, info in keys.items()}


@pytest.fixture(autouse=True)
def configs(registries: None) -> None:
    """A config of two keys, and one with a third."""
    model_configs.register(from_yaml(CONFIG % NAME))
    model_configs.register(
        from_yaml(CONFIG % OTHER + "  rest:\n    keys:\n      step: {shape: [2], dtype: float32}")
    )


def state(*keys: str, value: float = 1.0) -> StateDict:
    return {key: torch.full((2,), value) for key in keys}


def vae(*more: str) -> StateDict:
    """A VAE by its keys and shapes."""
    keys = {k: torch.zeros(i.shape, dtype=FLOAT8) for k, i in resolve("vae-ldm").keys().items()}
    return {**keys, **state(*more)}


def test_they_are_left_out_and_that_is_said(caplog):
    merged = merge(weighted_sum(model(state(X, Y, "step"), NAME), model(state(X, Y), NAME)))

    assert merged.keys() == {X, Y}
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert SAID in warning.message
    assert "left out. on_extra=keep merges them like the others." in warning.message


def test_nobody_is_warned_who_does_not_want_to_be(caplog):
    merged = merge(model(state(X, Y, "step"), NAME), check_extra_keys=False)

    assert merged.keys() == {X, Y}
    assert not caplog.records


def test_they_can_be_an_error_that_names_all_of_them():
    recipe = weighted_sum(model(state(X, Y, "step"), NAME), model(state(X, Y, "epoch"), NAME))

    with pytest.raises(CheckpointError, match=rf"(?s){SAID}\..*test': epoch\. on_extra=skip leaves them out"):
        merge(recipe, options=EngineOptions(on_extra="error"))


def test_they_can_be_merged_like_the_others(caplog):
    recipe = weighted_sum(model(state(X, "step"), NAME), model(state(X, "step", value=3.0), NAME), alpha=0.5)

    merged = merge(recipe, options=EngineOptions(on_extra="keep"))

    assert merged["step"].tolist() == [2, 2]
    assert not caplog.records


def test_a_key_by_another_name_is_none():
    assert merge(model(state("extras_test.former_x", Y), NAME)).keys() == {"extras_test.former_x", Y}


def test_a_key_that_another_input_has_by_right_is_merged():
    known = model(state(X, Y, "step"), OTHER)

    assert merge(weighted_sum(model(state(X, Y, "step"), NAME), known)).keys() == {X, Y, "step"}


def test_what_a_model_is_is_also_found_by_its_keys():
    with plan([Job(model(vae("optimizer.step")), {})]) as planned:
        assert planned.layouts[0].keys() == resolve("vae-ldm").keys().keys()
        (warning,) = planned.warnings

    assert "'vae-ldm': optimizer.step" in warning
    assert warning.about is About.EXTRA_KEYS


def test_a_model_of_no_known_config_has_none(caplog):
    assert merge(model(state("extras_unknown", "step"))).keys() == {"extras_unknown", "step"}
    assert not caplog.records


def test_relatives_of_a_family_keep_what_they_have_beside_it(caplog):
    relative = {**family(), "model.layers.0.self_attn.q_proj.bias": torch.ones(4)}

    assert merge(model(relative)).keys() == relative.keys()
    assert not caplog.records
    with pytest.raises(CheckpointError, match=r"'llama-hf': model\.layers\.0\.self_attn\.q_proj\.bias"):
        merge(model(relative), options=EngineOptions(on_extra="error"))
    assert merge(model(relative, "llama-hf")).keys() == family().keys()


def test_a_model_that_is_read_in_another_format_cannot_keep_them():
    options = EngineOptions(on_extra="keep")
    other = {k: torch.zeros(i.shape, dtype=FLOAT8) for k, i in resolve("vae-diffusers").keys().items()}
    recipe = weighted_sum(model(vae()), model({**other, **state("step")}))

    with plan([Job(recipe, {})], options) as planned:
        assert "step" not in planned.layouts[0]
        assert any(
            "step, and are left out, since it is read in another format" in w for w in planned.warnings
        )


def test_a_method_can_ask_for_them():
    @m.merge_method(register=False)
    def plus_step(a: m.Parameter(m.StateDict[torch.Tensor]), **kwargs) -> m.Return(torch.Tensor):
        return a[kwargs["key"]] + a["step"]

    assert merge(plus_step(model(state(X, Y, "step"), NAME)))[X].tolist() == [2, 2]


def test_the_choice_is_part_of_what_is_resumed_and_remembered(save):
    from mecha_exp.lab.signature import signature_of

    node = model(save("a", state(X, Y, "step")), NAME)
    digests = {
        signature_of(node, {node: "0"}, EngineOptions(on_extra=choice), {}).digest
        for choice in ("skip", "keep")
    }

    assert len(digests) == 2


def test_a_report_tells_values_that_are_not_finite_apart():
    report = merge_many([Job(model({"x": torch.tensor([1e30])}), {}, torch.float16)])

    (warning,) = report.warnings
    assert (warning, warning.about) == ("1 value of the output is not finite", About.NONFINITE_OUTPUT)

"""Adapters of PEFT on the command line, and in configurations of mergekit."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from outcome import Outcome
from peft_tensors import O, Q, lora
from safetensors.torch import load_file, save_file
from torch import Tensor

import mecha_exp as m

Base = dict[str, Tensor]
Adapter = Callable[..., str]
PREFIX = "base_model.model."


def change(factors: Base, module: str, scale: float = 3.0) -> Tensor:
    return scale * factors[f"{PREFIX}{module}.lora_B.weight"] @ factors[f"{PREFIX}{module}.lora_A.weight"]


@pytest.fixture
def adapters(base: Base, adapter: Adapter) -> dict[str, Base]:
    made = {"a": lora(Q), "b": lora(Q, O, seed=7)}
    for name, tensors in made.items():
        adapter(name, tensors)
    return made


def test_adapters_of_a_configuration_of_mergekit(base: Base, adapters: dict[str, Base]):
    config = {
        "merge_method": "linear",
        "parameters": {"normalize": False},
        "models": [
            {"model": "base", "parameters": {"weight": 0.5}},
            {"model": "base+a", "parameters": {"weight": 0.3}},
            {"model": {"model": "base", "lora": "b"}, "parameters": {"weight": 0.2}},
        ],
    }

    merged = m.merge(m.from_mergekit(config))

    expected = base[f"{Q}.weight"] + 0.3 * change(adapters["a"], Q) + 0.2 * change(adapters["b"], Q)
    torch.testing.assert_close(merged[f"{Q}.weight"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        merged[f"{O}.weight"], base[f"{O}.weight"] + 0.2 * change(adapters["b"], O), rtol=1e-5, atol=1e-6
    )


def test_layers_of_an_adapted_model_are_stacked(base: Base, adapters: dict[str, Base]):
    config = {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": "base", "layer_range": [0, 2]}]},
            {"sources": [{"model": "base+a", "layer_range": [0, 1]}]},
        ],
    }
    without_conv = {k: v for k, v in base.items() if "conv" not in k}

    save_file(without_conv, "base/model.safetensors")
    stacked = m.merge(m.from_mergekit(config))

    assert torch.equal(stacked[f"{Q}.weight"], base[f"{Q}.weight"])
    expected = base[f"{Q}.weight"] + change(adapters["a"], Q)
    torch.testing.assert_close(stacked["model.layers.2.q_proj.weight"], expected)
    assert torch.equal(stacked["model.layers.2.q_proj.bias"], base[f"{Q}.bias"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "base+",
            "models[0].model: expected a model as PATH, ORG/NAME@REVISION or MODEL+ADAPTER, got 'base+'",
        ),
        (
            {"model": "base+a", "lora": "b"},
            "models[0].model.lora: a model has one adapter here, got 'base+a'",
        ),
    ],
)
def test_a_reference_names_one_adapter(adapters: dict[str, Base], model: object, message: str):
    with pytest.raises(m.ConfigError, match=re.escape(message)):
        m.from_mergekit({"merge_method": "passthrough", "models": [{"model": model}]})


def test_a_model_is_not_an_adapter(adapters: dict[str, Base]):
    with pytest.raises(m.CheckpointError, match=r"base is not an adapter of PEFT: it has no adapter_config"):
        m.from_mergekit({"merge_method": "passthrough", "models": [{"model": "base+base"}]})


def test_an_adapter_is_an_expert_of_any_recipe(
    base: Base, adapters: dict[str, Base], app: Callable[..., Outcome], tmp_path: Path
):
    given = ("models.base=base", "models.experts=[a,b]", "tracking=none", "evaluator=none")
    ran = app("recipe=task_arithmetic", *given, "alpha=0.5", "output.path=merged", cwd=tmp_path)

    assert ran.status == 0, ran.err
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = base[f"{Q}.weight"] + 0.5 * (change(adapters["a"], Q) + change(adapters["b"], Q))
    torch.testing.assert_close(merged[f"{Q}.weight"], expected, rtol=1e-5, atol=1e-6)


def test_an_adapter_is_a_lora(
    base: Base, adapters: dict[str, Base], app: Callable[..., Outcome], tmp_path: Path
):
    given = ("recipe=lora", "models.base=base", "models.experts=[a]", "tracking=none", "evaluator=none")
    planned = app("plan", *given, "alpha=0.5", cwd=tmp_path)
    ran = app(*given, "alpha=0.5", "output.path=merged.safetensors", cwd=tmp_path)

    assert planned.status == ran.status == 0, planned.err + ran.err
    assert "warning" not in planned.out
    merged = load_file(tmp_path / "merged.safetensors")
    torch.testing.assert_close(merged[f"{Q}.weight"], base[f"{Q}.weight"] + 0.5 * change(adapters["a"], Q))


def test_a_result_is_made_again_when_the_configuration_of_its_adapter_changes(
    base: Base, adapters: dict[str, Base], app: Callable[..., Outcome], tmp_path: Path
):
    given = ("recipe=lora", "models.base=base", "models.experts=[a]", "tracking=none", "evaluator=none")
    config = tmp_path / "a" / "adapter_config.json"
    for alpha, scale in ((6, 3.0), (2, 1.0)):
        config.write_text(re.sub(r'"lora_alpha": \d+', f'"lora_alpha": {alpha}', config.read_text()))
        ran = app(*given, f"output.path=merged_{alpha}.safetensors", cwd=tmp_path)
        assert ran.status == 0, ran.err
        merged = load_file(tmp_path / f"merged_{alpha}.safetensors")
        expected = base[f"{Q}.weight"] + change(adapters["a"], Q, scale)
        torch.testing.assert_close(merged[f"{Q}.weight"], expected)


def test_info_says_what_an_adapter_is(
    adapters: dict[str, Base], adapter: Adapter, app: Callable[..., Outcome], tmp_path: Path
):
    adapter("masked", lora(Q), peft_type="ADALORA")

    read, refused = (app("info", name, cwd=tmp_path).out for name in ("b", "masked"))

    line = (
        "b: a LoRA adapter of PEFT (adapter_config.json), trained on org/base, 2 modules of rank 2, times 3"
    )
    assert line in read
    assert (
        "masked: an adapter that cannot be merged: masked/adapter_config.json: peft_type ADALORA" in refused
    )

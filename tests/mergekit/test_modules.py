"""Configurations with `modules`: what mergekit gives, and what is wrong with them."""

from pathlib import Path

import pytest
import torch
from mergekit_modules import MODULE_CONFIGS, write_module_models
from safetensors import safe_open

from mecha_exp import ConfigError, from_mergekit, merge
from mecha_exp.checkpoint import load

GOLDEN = Path(__file__).parents[1] / "golden" / "mergekit-modules.safetensors"
LINEAR = "merge_method: linear\nparameters: {weight: 1}\nmodules:\n"
BOTH = "{models: [{model: t5_a}, {model: t5_b}]}"
WHOLE_T5 = f"  encoder: {BOTH}\n  decoder: {BOTH}\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    write_module_models(folder)
    return folder


@pytest.mark.parametrize("name", MODULE_CONFIGS)
def test_the_output_is_that_of_mergekit(name: str, here: Path):
    (here / "config.yml").write_text(MODULE_CONFIGS[name])

    merged = merge(from_mergekit("config.yml"))

    with safe_open(GOLDEN, framework="pt") as golden:
        keys = [key for key in golden.keys() if key.startswith(f"{name}|")]
        assert merged.keys() == {key.partition("|")[2] for key in keys}
        for key in keys:
            expected = golden.get_tensor(key)
            torch.testing.assert_close(merged[key.partition("|")[2]], expected, rtol=1e-5, atol=1e-6)


def test_default_is_all_that_no_other_module_has(here: Path, models: Path):
    (here / "config.yml").write_text(
        "merge_method: passthrough\nmodules:\n"
        "  default: {models: [{model: t5_a}]}\n"
        "  decoder.block: {models: [{model: t5_b}]}\n"
    )

    merged = merge(from_mergekit("config.yml"))

    a, b = (load(models / name) for name in ("t5_a", "t5_b"))
    for key, tensor in merged.items():
        assert torch.equal(tensor, (b if key.startswith("decoder.block.") else a)[key])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            WHOLE_T5,
            "modules: lm_head.weight, shared.weight of the models are in no module, and mergekit",
        ),
        (f"  encodr: {BOTH}\n  default: {BOTH}", "modules.encodr: the models have no keys of it"),
        (f"  encoder: {BOTH}\n  encoder.block: {BOTH}\n  default: {BOTH}", "A key has one module."),
        ("  encoder: {slices: [{sources: []}]}", "modules.encoder.slices: layers of a single module"),
        ("  encoder: 3", "modules.encoder: expected 'models', got 3."),
        ("  encoder: {modles: []}", "modules.encoder: unknown word 'modles'. Did you mean 'models'?"),
        (f"  default: {BOTH}\nmodels: []\nslices: [{{}}]", "expected exactly one of 'models', 'slices' and"),
    ],
)
def test_what_is_wrong_with_modules_is_said(config: str, message: str, here: Path):
    (here / "config.yml").write_text(LINEAR + config)
    with pytest.raises(ConfigError) as error:
        from_mergekit("config.yml")
    assert message in str(error.value)

"""Configurations of mergekit give what mergekit 0.1.5 gives; `make parity` makes the golden file anew."""

import json
from pathlib import Path

import pytest
import torch
from mergekit_configs import CONFIGS
from safetensors import safe_open

from mecha_exp import from_mergekit, merge

GOLDEN = Path(__file__).parents[1] / "golden" / "mergekit-configs.safetensors"


def expected(name: str) -> dict[str, torch.Tensor]:
    with safe_open(GOLDEN, framework="pt") as golden:
        return {k.partition("|")[2]: golden.get_tensor(k) for k in golden.keys() if k.startswith(f"{name}|")}


def test_every_configuration_has_its_golden():
    with safe_open(GOLDEN, framework="pt") as golden:
        assert {key.partition("|")[0] for key in golden.keys()} == CONFIGS.keys()
        assert json.loads(golden.metadata()["configs"]).keys() == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_output_is_that_of_mergekit(name: str, here: Path):
    (here / "config.yml").write_text(CONFIGS[name])

    merged = merge(from_mergekit("config.yml"))

    golden = expected(name)
    assert merged.keys() == golden.keys()
    for key, tensor in golden.items():
        assert merged[key].dtype == tensor.dtype
        near = {"rtol": max(torch.finfo(tensor.dtype).eps, 1e-5), "atol": 1e-5 * tensor.abs().max().item()}
        torch.testing.assert_close(merged[key], tensor, **near, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.parametrize("name", [name for name in CONFIGS if "slices" in name])
def test_the_number_of_layers_is_that_of_mergekit(name: str, here: Path):
    with safe_open(GOLDEN, framework="pt") as golden:
        facts = json.loads(golden.metadata()["configs"])[name]

    (here / "config.yml").write_text(CONFIGS[name])
    merge(from_mergekit("config.yml"), here / "merged")

    content = json.loads((here / "merged" / "config.json").read_text())
    assert content["num_hidden_layers"] == facts["num_hidden_layers"]

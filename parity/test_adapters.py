"""LoRA files add what they add in sd-mecha 1.1.8, and are extracted as its functions do.

`make parity` writes the golden file anew, from sd-mecha in an environment of its own.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mecha_exp as m
from mecha_exp.methods.adapters import kronecker_factors, lora_factors
from parity.adapters import CONFIGS, ROWS, difference, files, text

GOLDEN = load_file(Path(__file__).parents[1] / "tests" / "golden" / "sd-mecha-adapters.safetensors")
OPTIONS = m.EngineOptions(compute_dtype=torch.float64)


@pytest.mark.parametrize("name", files())
def test_a_lora_adds_what_it_adds_there(name):
    config = name.partition("|")[0]
    recipe = m.convert(m.model(files()[name], config), CONFIGS[config][-1])

    made = m.merge(recipe, options=OPTIONS)

    wanted = {key.removeprefix(f"{name}|"): x for key, x in GOLDEN.items() if key.startswith(f"{name}|")}
    assert made.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(made[key][:ROWS], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
def test_its_text_is_written_and_read_as_there(config):
    recipe = m.convert(m.model("lora.safetensors", config), CONFIGS[config][-1])

    assert m.serialize(recipe) == text(config), "sd-mecha has written and read this very text"
    assert m.deserialize(text(config)) is recipe


def test_factors_of_a_difference_make_what_those_found_there_make():
    delta = difference()
    up, down, alpha = lora_factors(delta, 3)
    w1, w2 = kronecker_factors(delta, 0.5)
    theirs = {key.removeprefix("extracted|"): x for key, x in GOLDEN.items() if key.startswith("extracted|")}

    assert alpha == theirs["alpha"]
    assert (down.shape, w1.shape, w2.shape) == tuple(theirs[x].shape for x in ("down", "w1", "w2"))
    assert up.shape == (*theirs["up"].shape, 1, 1), "as the scripts that read such files expect it"
    torch.testing.assert_close(up.flatten(1) @ down.flatten(1), theirs["up"] @ theirs["down"].flatten(1))
    torch.testing.assert_close(
        torch.kron(w1[..., None, None], w2), torch.kron(theirs["w1"][..., None, None], theirs["w2"])
    )

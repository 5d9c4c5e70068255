"""`output.vae` and `output.prune`: another VAE in a merged model, and no EMA weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

CONFIG = """
identifier: parts-test
components:
  unet: {keys: {'unet.{one,two}.weight': [4, 3]}}
  vae: {keys: {'vae.{one,two}.weight': [4, 3]}}
  ema: {keys: {'ema.{one,two}.weight': [4, 3]}}
"""
GIVEN = (
    "recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]", "alpha=0.5",
    "evaluator=none", "tracking=none",
)  # fmt: skip


@pytest.fixture
def models(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    (folder / "model_configs").mkdir()
    (folder / "model_configs" / "parts-test.yaml").write_text(CONFIG)
    made = {}
    for seed, (name, parts) in enumerate(
        {"a": ("unet", "vae", "ema"), "b": ("unet", "vae", "ema"), "v": ("vae",)}.items()
    ):
        torch.manual_seed(seed)
        made[name] = {f"{part}.{key}.weight": torch.randn(4, 3) for part in parts for key in ("one", "two")}
        save_file(made[name], folder / f"{name}.safetensors")
    return made


def test_the_vae_is_that_of_the_file_and_ema_weights_are_left_out(app, folder, models):
    outcome = app(*GIVEN, "output.vae=v.safetensors", "output.prune=true", "output.path=out.safetensors")

    assert outcome.status == 0, outcome.err
    out = load_file(folder / "out.safetensors")
    assert set(out) == {f"{part}.{key}.weight" for part in ("unet", "vae") for key in ("one", "two")}
    assert all(torch.equal(out[key], value) for key, value in models["v"].items())
    assert torch.equal(out["unet.one.weight"], torch.lerp(*(models[n]["unet.one.weight"] for n in "ab"), 0.5))


def test_vaes_are_points_of_a_sweep_that_reproduce(app, folder, models, no_figures):
    words = [*GIVEN, "output.vae=v.safetensors,null", "output.prune=true"]

    assert app(*words, "-m").status == 0
    (sweep,) = (folder / "outputs" / "multiruns").iterdir()
    baked, own = (load_file(sweep / point / "model.safetensors")["vae.one.weight"] for point in "01")
    assert torch.equal(baked, models["v"]["vae.one.weight"]) and not torch.equal(baked, own)
    assert app("reproduce", str(sweep / "0")).status == 0


@pytest.mark.parametrize(
    ("word", "part"), [("output.vae=v.safetensors", "vae"), ("output.prune=true", "ema")]
)
def test_a_model_without_the_part_is_refused(app, models, word, part):
    outcome = app("recipe=task_arithmetic", "evaluator=none", "tracking=none", word)  # the digits

    assert outcome.status != 0
    assert f"has no component '{part}'" in outcome.err


def test_a_vae_that_does_not_exist_is_an_error(app, models):
    outcome = app(*GIVEN, "output.vae=w.safetensors")

    assert outcome.status != 0
    assert "the model 'w.safetensors' does not exist" in outcome.err

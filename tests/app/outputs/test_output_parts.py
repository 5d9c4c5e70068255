"""`output.prune` leaves EMA weights out. `recipe=bake_vae` puts a part of another file into a model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

CONFIG = """
identifier: parts-test
components:
  unet: {keys: {'unet.{one,two}.weight': [4, 3]}}
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
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        names = [f"{part}.{key}.weight" for part in ("unet", "ema") for key in ("one", "two")]
        made[name] = {key: torch.randn(4, 3) for key in names}
        save_file(made[name], folder / f"{name}.safetensors")
    return made


def test_ema_weights_are_left_out(app, folder, models):
    outcome = app(*GIVEN, "output.prune=true", "output.path=out.safetensors")

    assert outcome.status == 0, outcome.err
    out = load_file(folder / "out.safetensors")
    assert set(out) == {"unet.one.weight", "unet.two.weight"}
    assert torch.equal(out["unet.one.weight"], torch.lerp(*(models[n]["unet.one.weight"] for n in "ab"), 0.5))


def test_ema_weights_that_one_model_alone_has_are_left_out(app, folder, models):
    save_file({k: t for k, t in models["b"].items() if k.startswith("unet.")}, folder / "b.safetensors")

    outcome = app(*GIVEN, "output.prune=true", "output.path=out.safetensors")

    assert outcome.status == 0, outcome.err
    assert set(load_file(folder / "out.safetensors")) == {"unet.one.weight", "unet.two.weight"}


def test_both_kinds_are_points_of_a_sweep_that_reproduce(app, folder, models):
    assert app(*GIVEN, "output.prune=true,false", "-m").status == 0

    (sweep,) = (folder / "outputs" / "multiruns").iterdir()
    assert [len(load_file(sweep / point / "model.safetensors")) for point in "01"] == [2, 4]
    assert app("reproduce", str(sweep / "0")).status == 0


def test_a_model_without_ema_weights_is_refused(app):
    outcome = app(
        "recipe=task_arithmetic", "evaluator=none", "tracking=none", "output.prune=true"
    )  # the digits

    assert outcome.status != 0
    assert "has no component 'ema'" in outcome.err


def test_a_part_of_another_file_is_put_into_a_model(app, folder, models):
    part = {key: tensor for key, tensor in models["b"].items() if key.startswith("unet.")}
    save_file(part, folder / "part.safetensors")

    outcome = app(
        "recipe=bake_vae", "models.base=a.safetensors", "models.experts=[part.safetensors]", "evaluator=none",
        "tracking=none", "output.path=out.safetensors",
    )  # fmt: skip

    assert outcome.status == 0, outcome.err
    out = load_file(folder / "out.safetensors")
    assert all(torch.equal(out[key], (part if key in part else models["a"])[key]) for key in models["a"])
    assert out.keys() == models["a"].keys()

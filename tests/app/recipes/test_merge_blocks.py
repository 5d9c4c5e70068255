"""Merge block weights of Stable Diffusion on the command line, with a network of its blocks and few weights.

The real one is as large as it is: what its plan says is tested on a file of holes.
"""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from state_dicts import write_holes

from mecha_exp.graph.curves import PRESETS, Preset

BLOCKS = [*(f"IN{i:02}" for i in range(12)), "M00", *(f"OUT{i:02}" for i in range(12))]
CONFIG = """\
identifier: tinysd-ldm
components:
  diffuser:
    keys:
      "{time_embed,out}.weight": [2]
      input_blocks.{0..11}.weight: [2]
      middle_block.weight: [2]
      output_blocks.{0..11}.weight: [2]
    blocks:
      input_blocks.{0..11}.*: IN{00..11}
      middle_block.*: M00
      output_blocks.{0..11}.*: OUT{00..11}
      out.*: OUT11
      "*": BASE
    conventions:
      supermerger: {time_embed.*: IN00}
"""
RECIPE = ("recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]", "alpha=0")


@pytest.fixture
def tiny(folder: Path) -> Path:
    """Zeros to be merged with ones: a merged weight is the strength that its block got."""
    (folder / "model_configs").mkdir()
    (folder / "model_configs" / "tinysd-ldm.yaml").write_text(CONFIG)
    names = ["time_embed", "out", "middle_block"]
    names += [f"{side}_blocks.{i}" for side in ("input", "output") for i in range(12)]
    for file, value in (("a", 0.0), ("b", 1.0)):
        save_file({f"{name}.weight": torch.full((2,), value) for name in names}, f"{file}.safetensors")
    return folder


def weights(folder: Path) -> dict[str, float]:
    """The value of each block in a run's table."""
    with (folder / "block_values.csv").open() as file:
        return {row["block"]: float(row["value"]) for row in csv.DictReader(file)}


def runs(folder: Path) -> dict[str, Path]:
    """The folders of a sweep's points, by the preset that each had."""
    found = [path.parent for path in folder.glob("outputs/multiruns/*/*/run.json")]
    return {json.loads((path / "run.json").read_text())["name"].partition("=")[2]: path for path in found}


def published(name: str) -> list[float]:
    return [Preset(name).at(place, len(BLOCKS)) for place in range(len(BLOCKS))]


def test_presets_are_swept_with_single_blocks_over_them(app, tiny):
    outcome = app(*RECIPE, "blocks=[GRAD_V,WRAP12]", "blocks.IN04=0.7", "output=none", "-m")

    assert outcome.status == 0, outcome.err
    found = runs(tiny)
    assert found.keys() == {"GRAD_V", "WRAP12"}
    for name, folder in found.items():
        values = dict(zip(BLOCKS, published(name), strict=True)) | {"IN04": 0.7, "BASE": 0}
        assert weights(folder) == pytest.approx(values)


@pytest.mark.heavy
def test_all_presets_are_one_pass(app, tiny, passes_run):
    outcome = app(*RECIPE, "blocks=all_presets", "output=none", "-m")

    assert outcome.status == 0, outcome.err
    assert passes_run == [len(PRESETS)] == [38 + len(["LINEAR"])]
    found = runs(tiny)
    assert found.keys() == set(PRESETS)
    for name, folder in found.items():
        assert [weights(folder)[block] for block in BLOCKS] == pytest.approx(published(name)), name


def test_the_convention_moves_the_layers_that_projects_disagree_on(app, tiny):
    for convention, time in (("sd-mecha", 0.0), ("supermerger", 0.7)):
        words = ("blocks.IN00=0.7", f"blocks.convention={convention}", "output.path=merged.safetensors")
        outcome = app(*RECIPE, *words)

        assert outcome.status == 0, outcome.err
        merged = load_file("merged.safetensors")
        assert merged["time_embed.weight"][0].item() == pytest.approx(time)
        assert merged["input_blocks.0.weight"][0].item() == pytest.approx(0.7)
        assert merged["input_blocks.1.weight"][0].item() == 0
    recorded = [json.loads(path.read_text())["parameters"] for path in tiny.glob("outputs/runs/*/run.json")]
    assert any("supermerger" in str(parameters) for parameters in recorded)


def test_a_convention_that_there_is_not_is_met_with_the_nearest(app, tiny):
    outcome = app(*RECIPE, "blocks.IN00=0.7", "blocks.convention=supermreger")

    assert outcome.status == 1
    assert "no block convention 'supermreger'. Did you mean 'supermerger'?" in " ".join(outcome.err.split())


def test_the_plan_of_a_real_checkpoint_has_the_published_numbers(app, folder):
    for name in ("a", "b"):
        write_holes(folder / f"{name}.safetensors", "sd1-ldm")

    outcome = app(*RECIPE, "blocks=SMOOTHSTEP", "blocks.IN04=0.7", "debug=plan")

    assert outcome.status == 0, outcome.err
    shown = [line.split()[:2] for line in outcome.out.splitlines() if line.strip().startswith(tuple(BLOCKS))]
    expected = dict(zip(BLOCKS, published("SMOOTHSTEP"), strict=True)) | {"IN04": 0.7}
    assert {block: float(value) for block, value in shown} == pytest.approx(expected, rel=1e-3)

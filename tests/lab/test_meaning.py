"""Signatures and journals know what the names of blocks, presets and model configs mean."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mecha_exp import EngineOptions, Job, for_keys, merge_many
from mecha_exp.architectures import from_yaml, register
from mecha_exp.architectures.library import registry
from mecha_exp.engine.planner import meaning as meanings
from mecha_exp.engine.planner.by_key import parse_output_dtype
from mecha_exp.engine.planner.meaning import meaning_of
from mecha_exp.errors import MechaError
from mecha_exp.graph import curves
from mecha_exp.graph.nodes import Node, models_of
from mecha_exp.lab.signature import Signature, signature_of
from mecha_exp.methods.linear import weighted_sum

CONFIG = """
identifier: tiny-own
components:
  net:
    keys:
      {keys}: [2]
    blocks:
{blocks}
"""
KEYS = "layer.{0..3}.weight"
HALVES = {"layer.0.*": "early", "layer.1.*": "early", "*": "late"}
NUMBERED = {"layer.{0..3}.*": '"{0..3}"'}


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    for name, value in {"a": 1.0, "b": 3.0}.items():
        save_file(
            {f"layer.{i}.weight": torch.full((2,), value) for i in range(4)}, tmp_path / f"{name}.safetensors"
        )
    return str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")


EARLIER = ExitStack()


def with_config(blocks: dict[str, str], keys: str = KEYS, shape: str = "[2]") -> None:
    """Register the model config in place of an earlier one, as another process would after an edit."""
    EARLIER.close()
    EARLIER.enter_context(registry.isolated())
    rules = "\n".join(f'      "{pattern}": {block}' for pattern, block in blocks.items())
    register(from_yaml(CONFIG.format(keys=keys, blocks=rules).replace("[2]", shape)))


def signed(recipe: Node, dtype: object = None, **options: str) -> Signature:
    files = {model: Path(str(model.source)) for model in models_of(recipe)}
    settings = EngineOptions(**options)  # type: ignore[arg-type]
    meaning = meaning_of(recipe, parse_output_dtype(dtype), files, settings)
    contents = {model: path.name for model, path in files.items()}
    return signature_of(recipe, contents, settings, {"dtype": meaning.dtype}, meaning)


def test_a_key_that_moves_to_another_block_changes_the_signature(models):
    recipe = weighted_sum(*models, alpha={"early": 0.1, "default": 0.5})
    with_config(HALVES)
    first = signed(recipe)
    with_config({"layer.0.*": "early", "*": "late"})
    moved = signed(recipe)
    with_config(HALVES)

    assert moved.recipe != first.recipe
    assert signed(recipe).digest == first.digest != moved.digest


def test_a_key_that_leaves_the_config_changes_the_signature(models):
    recipe = weighted_sum(*models, alpha=0.5)
    with_config(HALVES)
    first = signed(recipe)
    with_config(HALVES, keys="layer.{0..2}.weight")

    assert signed(recipe).digest != first.digest


@pytest.mark.parametrize("edit", ["optional: true", "aliases: ['other.{}']"])
def test_every_property_of_a_key_is_part_of_a_configs_digest(edit):
    plain = from_yaml("identifier: x-y\ncomponents: {net: {keys: {'a.{0..1}': {shape: [2]}}}}")
    edited = from_yaml(
        "identifier: x-y\ncomponents: {net: {keys: {'a.{0..1}': {shape: [2], "
        + edit.replace("{}", "{0..1}")
        + "}}}}"
    )

    assert plain.digest != edited.digest


def test_which_keys_a_merge_is_for_counts_by_the_keys_and_not_by_their_names(models):
    merged = weighted_sum(*models, alpha=0.25)

    first, same, all_keys, none = (
        signed(for_keys(merged, keys)).digest for keys in ("vector", "axes:1", "all", "matrix")
    )

    assert first == same
    assert len({first, all_keys, none}) == 3


def test_a_preset_counts_by_its_numbers(models, monkeypatch):
    with_config(NUMBERED)
    recipe = weighted_sum(*models, alpha={"preset": "GRAD_V"})
    first = signed(recipe)
    monkeypatch.setitem(curves.PRESETS, "GRAD_V", lambda index, count: index / 7)

    assert signed(recipe).recipe != first.recipe


@pytest.mark.parametrize(
    ("alpha", "same_as"),
    [
        ({"early": 0.5, "default": 0.5}, 0.5),
        ({"early": 0.5, "late": 0.25}, {"layer.{}": None}),
        ({"layer.0": 0.5, "layer.1": 0.5, "default": 0.25}, {"early": 0.5, "default": 0.25}),
        ({"re:layer.[01]": 0.5, "late": 0.25}, {"early": 0.5, "default": 0.25}),
    ],
)
def test_equal_numbers_have_one_signature(models, alpha, same_as):
    with_config(HALVES)
    if same_as == {"layer.{}": None}:
        same_as = {f"layer.{i}": 0.5 if i < 2 else 0.25 for i in range(4)}

    assert (
        signed(weighted_sum(*models, alpha=alpha)).digest
        == signed(weighted_sum(*models, alpha=same_as)).digest
    )


def test_the_dtype_of_an_output_by_block_counts_by_its_keys(models):
    recipe = weighted_sum(*models, alpha=0.5)
    with_config(HALVES)
    first = signed(recipe, {"early": "bf16"})
    same = signed(recipe, {"layer.0": "bf16", "layer.1": "bf16"})
    other = signed(recipe, {"layer.0": "bf16"})

    assert first.settings == same.settings
    assert first.settings != other.settings


def test_the_headers_of_a_sweeps_models_are_read_once(models, monkeypatch):
    with_config(HALVES)
    opened: list[int] = []
    open_sources = meanings.open_sources
    monkeypatch.setattr(meanings, "open_sources", lambda *a: opened.append(1) or open_sources(*a))

    digests = {
        signed(weighted_sum(*models, alpha={"early": value / 50, "default": 0.7})).digest
        for value in range(50)
    }

    assert (len(digests), len(opened)) == (50, 1)


def test_old_and_new_blocks_never_meet_in_one_file(models, tmp_path):
    recipe = weighted_sum(*models, alpha={"early": 0.0, "default": 1.0})
    target = tmp_path / "merged.safetensors"
    finished: list[str] = []

    def stop(key: str, _: int) -> None:
        finished.append(key)
        if len(finished) == 2:
            raise KeyboardInterrupt

    with_config(HALVES)
    with pytest.raises(KeyboardInterrupt):
        merge_many([Job(recipe, target)], EngineOptions(workers=1), stop)
    with_config({"layer.3.*": "early", "*": "late"})
    report = merge_many([Job(recipe, target)], EngineOptions(workers=1))

    values = {key: tensor[0].item() for key, tensor in load_file(target).items()}
    assert report.resumed_keys == 0
    assert values == {f"layer.{i}.weight": 1.0 if i == 3 else 3.0 for i in range(4)}


def test_what_planning_will_report_keeps_its_names(models):
    with_config(HALVES)
    recipe = weighted_sum(*models, alpha={"early": 0.5})  # nothing for the late ones

    assert signed(recipe).digest != signed(weighted_sum(*models, alpha={"early": 0.5, "default": 0.5})).digest
    with pytest.raises(MechaError, match="there is no 'default'"):
        merge_many([Job(recipe, {})])

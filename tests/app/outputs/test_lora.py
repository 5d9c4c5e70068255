"""LoRA files on the command line, for models whose config lies in the folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from outcome import Outcome
from safetensors import safe_open
from safetensors.torch import load_file, save_file

CONFIG = "identifier: pair-test\ncomponents: {net: {keys: {'{one,two}.weight': [12, 8], norm.weight: [8]}}}"
ADAPTER = "identifier: pair-lora\nadapter: {base: pair-test, prefix: lora}"
TEMPLATE = (
    'version 0.1.0\nparameter "base"\nparameter "lora"\nmerge "lora_delta" &1 &0\n'
    'merge "add_difference" &0 &2 alpha=0.5\n'
)
GIVEN = ("recipe=lora", "models.base=base.safetensors", "models.experts=[lora.safetensors]", "tracking=none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base, two LoRA files, and what their config is."""
    (tmp_path / "model_configs").mkdir()
    (tmp_path / "model_configs" / "pair-test.yaml").write_text(CONFIG)
    (tmp_path / "model_configs" / "pair-lora.yaml").write_text(ADAPTER)
    (tmp_path / "template.mecha").write_text(TEMPLATE)
    torch.manual_seed(0)
    base = {"one.weight": torch.randn(12, 8), "two.weight": torch.randn(12, 8), "norm.weight": torch.ones(8)}
    save_file(base, tmp_path / "base.safetensors")
    for name, layer in {"lora": "one", "other": "two"}.items():
        factors = {"lora_up.weight": torch.randn(12, 2), "lora_down.weight": torch.randn(2, 8)}
        factors["alpha"] = torch.tensor(1.0)
        save_file(
            {f"lora_{layer}.{suffix}": x for suffix, x in factors.items()}, tmp_path / f"{name}.safetensors"
        )
    return tmp_path


def with_lora(folder: Path, alpha: float, name: str = "lora", layer: str = "one") -> torch.Tensor:
    lora = load_file(folder / f"{name}.safetensors")
    up, down = (lora[f"lora_{layer}.lora_{x}.weight"] for x in ("up", "down"))
    return load_file(folder / "base.safetensors")[f"{layer}.weight"] + alpha * up @ down / 2


def done(outcome: Outcome) -> Outcome:
    assert outcome.status == 0, outcome.err
    return outcome


@pytest.mark.heavy
def test_a_lora_is_swept_over_its_strength(folder: Path, app: Callable[..., Outcome]):
    planned = done(app("plan", *GIVEN, "alpha=0.5", cwd=folder))
    assert "lora.safetensors" in planned.out
    assert "warning" not in planned.out

    done(app(*GIVEN, "alpha=0.5,1.0", "-m", cwd=folder))

    models = sorted(folder.glob("outputs/multiruns/*/*/model.safetensors"))
    assert len(models) == 2
    for path, alpha in zip(models, (0.5, 1.0), strict=True):
        merged = load_file(path)
        torch.testing.assert_close(merged["one.weight"], with_lora(folder, alpha))
        assert torch.equal(merged["two.weight"], load_file(folder / "base.safetensors")["two.weight"])
    made_again = done(app("reproduce", str(models[0]), cwd=folder))
    assert "identical" in made_again.out


@pytest.mark.heavy
def test_a_template_is_swept_over_lora_files(folder: Path, app: Callable[..., Outcome]):
    given = ("recipe=mecha", "recipe.path=template.mecha", "base=base.safetensors", "tracking=none")
    done(app(*given, "lora=lora.safetensors,other.safetensors", "-m", cwd=folder))

    first, second = (load_file(p) for p in sorted(folder.glob("outputs/multiruns/*/*/model.safetensors")))
    torch.testing.assert_close(first["one.weight"], with_lora(folder, 0.5))
    torch.testing.assert_close(second["two.weight"], with_lora(folder, 0.5, "other", "two"))


@pytest.mark.heavy
def test_the_verbs_take_a_template_with_a_lora(folder: Path, app: Callable[..., Outcome]):
    filled = ("-p", "base", "base.safetensors", "-p", "lora", "lora.safetensors")
    assert "lora_delta" in done(app("show", "template.mecha", cwd=folder)).out
    assert "lora.safetensors" in done(app("plan", "template.mecha", *filled, cwd=folder)).out
    done(app("compose", "template.mecha", *filled, "-o", "composed.mecha", cwd=folder))
    done(app("merge", "composed.mecha", "-o", "merged.safetensors", cwd=folder))

    torch.testing.assert_close(load_file(folder / "merged.safetensors")["one.weight"], with_lora(folder, 0.5))
    with safe_open(folder / "merged.safetensors", "pt") as file:
        assert "lora_delta" in file.metadata()["mecha_recipe"]
    shown = done(app("info", "lora.safetensors", cwd=folder)).out
    assert "lora.safetensors: pair-lora" in shown
    assert (
        "LoRA modules of any rank, which add to the tensors of pair-test"
        in done(app("info", "pair-lora", cwd=folder)).out
    )


@pytest.mark.heavy
def test_what_an_expert_learnt_becomes_a_lora_file_and_back(folder: Path, app: Callable[..., Outcome]):
    done(app(*GIVEN, "output.path=fine.safetensors", cwd=folder))
    given = ("recipe=extract_lora", "models.base=base.safetensors", "models.experts=[fine.safetensors]")
    done(app(*given, "rank=2", "tracking=none", "output.path=extracted.safetensors", cwd=folder))

    made = load_file(folder / "extracted.safetensors")
    delta = with_lora(folder, 1.0) - load_file(folder / "base.safetensors")["one.weight"]
    assert {key.partition(".")[0] for key in made} == {"lora_one"}, "the other module did not change"
    torch.testing.assert_close(
        made["lora_one.lora_up.weight"] @ made["lora_one.lora_down.weight"], delta, rtol=1e-4, atol=1e-4
    )


def test_the_method_of_the_recipe_chooses_the_names(folder: Path, app: Callable[..., Outcome]):
    (folder / "model_configs" / "a.yaml").write_text(ADAPTER.replace("lora", "lycoris"))
    save_file(
        {k: 2 * x for k, x in load_file(folder / "base.safetensors").items()}, folder / "fine.safetensors"
    )
    given = ("recipe=extract_lora", "models.base=base.safetensors", "models.experts=[fine.safetensors]")
    lycoris = ("recipe.method=extract_lycoris_lora", "tracking=none", "output.path=made.safetensors")

    done(app(*given, *lycoris, cwd=folder))

    assert {key.partition("_")[0] for key in load_file(folder / "made.safetensors")} == {"lycoris"}


def test_a_file_for_another_model_is_an_error_in_plain_words(folder: Path, app: Callable[..., Outcome]):
    save_file(
        {"lora_three.diff": torch.ones(12, 8), "lora_one.diff": torch.ones(12, 8)},
        folder / "lora.safetensors",
    )
    foreign = app(*GIVEN, cwd=folder)
    save_file({f"lora_{x}.diff": torch.ones(5, 8) for x in ("one", "two")}, folder / "lora.safetensors")
    unknown = app(*GIVEN, cwd=folder)

    assert foreign.status == unknown.status == 1
    assert "the LoRA is of no known model config and the base of 'pair-test'" in foreign.err
    assert "the LoRA is of no known model config and the base of 'pair-test'" in unknown.err
    assert "Traceback" not in foreign.err + unknown.err


def test_the_verb_that_copies_numbers_says_that_a_lora_is_computed(folder: Path, app: Callable[..., Outcome]):
    refused = app("convert", "lora.safetensors", "--to", "pair-test", "-o", "x.safetensors", cwd=folder)

    assert refused.status == 1
    assert (
        "there is no conversion from pair-lora to pair-test: a LoRA is a difference to a model" in refused.err
    )
    assert not (folder / "x.safetensors").exists()


def test_a_whole_model_in_the_place_of_a_lora_is_said(folder: Path, app: Callable[..., Outcome]):
    (folder / "whole.safetensors").write_bytes((folder / "base.safetensors").read_bytes())
    given = ["models.experts=[whole.safetensors]" if "experts" in word else word for word in GIVEN]

    refused = app("plan", *given, "alpha=0.5", cwd=folder)

    assert refused.status == 1
    assert "what is given as the LoRA is a model of 'pair-test' itself, as the base is." in refused.err

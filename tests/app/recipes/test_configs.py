"""Every option composes, and every recipe is the formula that its name promises."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

from mecha_exp import truncate_kronecker
from mecha_exp.app.config.compose import composer_of
from mecha_exp.app.config.method_recipes import titled
from mecha_exp.app.config.options import option_values
from mecha_exp.app.preparation import prepare, resolve
from mecha_exp.architectures import from_yaml, register
from mecha_exp.engine import merge_many
from mecha_exp.errors import RecipeError
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.random import uniforms

CONF = Path(__file__).parents[3] / "conf"
DIGITS = Path(__file__).parents[3] / "examples" / "digits"
FILES = sorted(
    (path.parent.relative_to(CONF).as_posix(), path.stem)
    for path in CONF.glob("**/*.yaml")
    if path.parent != CONF and not path.is_relative_to(CONF / "hydra")
)
OPTIONS = FILES + [("recipe", name) for name in titled()]
OF_FILES = ("align_tokens", "mecha", "mergekit")
"""Recipes that read more than their models' tensors: tokenizers, or another recipe."""

RECIPES = [name for group, name in OPTIONS if group == "recipe" and name not in OF_FILES]

base, *experts = (
    {key: tensor.double() for key, tensor in load_file(DIGITS / f"{name}.safetensors").items()}
    for name in ("base", "expert_0_3", "expert_4_6", "expert_7_9")
)


def composed(*overrides: str):
    with composer_of([]) as composer:
        return composer.compose(overrides)


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes(group: str, name: str):
    config = composed(f"{group}={name}")

    assert config.recipe is not None
    assert OmegaConf.to_yaml(config)


@pytest.mark.parametrize(("group", "name"), FILES)
def test_every_file_says_what_it_is_in_its_first_lines(group: str, name: str):
    lines = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()

    comments = [line for line in lines if line.startswith("#") and "@package" not in line]
    assert comments, "a configuration file begins with a comment for people"


def deltas(key: str) -> list[Tensor]:
    return [expert[key] - base[key] for expert in experts]


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    omega = torch.arccos((a * b).sum() / (a.norm() * b.norm()))
    direction = (
        torch.sin((1 - t) * omega) * a / a.norm() + torch.sin(t * omega) * b / b.norm()
    ) / omega.sin()
    return direction * ((1 - t) * a.norm() + t * b.norm())


def ties(key: str, alpha: float = 1.0, k: float = 0.2) -> Tensor:
    trimmed = []
    for d in deltas(key):
        count = max(int(k * d.numel()), 1)
        t = d.abs().flatten().topk(count).values[-1]
        trimmed.append(torch.where(d.abs() >= t, d, 0))
    stacked = torch.stack(trimmed)
    agree = (stacked.sign() == stacked.sum(0).sign()) & (stacked != 0)
    return base[key] + alpha * (stacked * agree).sum(0) / agree.sum(0).clamp(min=1)


def dare_ties(key: str, alpha: float = 0.5, density: float = 0.5) -> Tensor:
    kept = []
    for i, d in enumerate(deltas(key)):
        draws = torch.from_numpy(uniforms(key, 0, d.numel(), seed=0, stream=i)).reshape(d.shape)
        kept.append(torch.where(draws < density, d / density, 0))
    stacked = torch.stack(kept)
    agree = (stacked.sign() == stacked.sum(0).sign()) & (stacked != 0)
    return base[key] + alpha * (stacked * agree).sum(0) / agree.sum(0).clamp(min=1)


def model_stock(key: str) -> Tensor:
    ds = deltas(key)
    cosine = sum((a * b).sum() / (a.norm() * b.norm()) for a, b in combinations(ds, 2)) / 3
    return base[key] + 3 * cosine / (1 + 2 * cosine) * sum(ds) / 3


def model_stock_rows(key: str) -> Tensor:
    ds = deltas(key)
    cosine = sum(torch.cosine_similarity(a, b, dim=-1) for a, b in combinations(ds, 2)) / 3
    t = (3 * cosine / (1 + 2 * cosine)).unsqueeze(-1)  # one for each row
    return base[key] + torch.where((1 + 2 * cosine.unsqueeze(-1)).abs() < 1e-6, 0, t * sum(ds) / 3)


def clamped(key: str) -> Tensor:
    stacked = torch.stack([expert[key] for expert in experts])
    return (base[key] + sum(deltas(key))).clamp(stacked.amin(0), stacked.amax(0))


def truncated(key: str) -> Tensor:
    d = deltas(key)[0]
    if d.ndim < 2:
        return base[key] + d
    u, s, vh = torch.linalg.svd(d.flatten(1), full_matrices=False)
    return base[key] + ((u[:, :8] * s[:8]) @ vh[:8]).reshape(d.shape)


FORMULAS: dict[str, Callable[[str], Tensor]] = {
    "weighted_sum": lambda key: 0.5 * base[key] + 0.5 * experts[0][key],
    "add_difference": lambda key: experts[0][key] + experts[1][key] - base[key],
    "n_average": lambda key: sum(e[key] for e in experts) / 3,
    "slerp": lambda key: slerp(experts[0][key], experts[1][key], 0.5),
    "slerp_then_sum": lambda key: (
        0.67 * slerp(experts[0][key], experts[1][key], 0.5) + 0.33 * experts[2][key]
    ),
    "task_arithmetic": lambda key: base[key] + 0.3 * sum(deltas(key)),
    "ties": ties,
    "dare_ties": dare_ties,
    "model_stock": model_stock,
    "model_stock_rows": model_stock_rows,
    "clamp": clamped,
    "clip": clamped,
    "passthrough": lambda key: experts[0][key],
    "truncate_rank": truncated,
    "truncate_kronecker": lambda key: (
        base[key] + truncate_kronecker.__wrapped__(deltas(key)[0], 0.5, use_approximate_basis=False)
    ),
}


def merged_by(name: str, folder: Path, *overrides: str) -> dict[str, Tensor]:
    config = composed(f"recipe={name}", "output=none", "engine.compute_dtype=float64", *overrides)
    point = prepare(resolve(config), folder)
    merged: dict[str, torch.Tensor] = {}
    merge_many([point.job(merged)], point.options)
    return merged


@pytest.mark.parametrize("name", FORMULAS)
def test_a_recipe_merges_the_demo_as_its_formula_says(name: str, tmp_path: Path):
    merged = merged_by(name, tmp_path)

    assert merged.keys() == base.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, FORMULAS[name](key).float(), rtol=1e-6, atol=1e-8)


def test_two_networks_in_one_order_are_averaged_where_their_config_says_how(tmp_path: Path):
    keys = {"query.weight": (6, 4), "key.weight": (6, 4)}
    rule = "{head: 3, rows: [query.weight, key.weight]}"
    text = f"keys: {{query.weight: [6, 4], key.weight: [6, 4]}}, symmetries: {{'': [{rule}]}}"
    register(from_yaml(f"{{identifier: tiny-test, components: {{x: {{{text}}}}}}}"))
    one = {key: torch.randn(shape, dtype=torch.float64) for key, shape in keys.items()}
    files = [str(tmp_path / f"{letter}.safetensors") for letter in "ab"]
    save_file(one, files[0])
    save_file({key: x[[2, 0, 1, 3, 5, 4]] for key, x in one.items()}, files[1])

    merged = merged_by("rebasin", tmp_path, f"models.experts=[{','.join(files)}]")

    assert merged.keys() == one.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, one[key])
    with pytest.raises(RecipeError, match=r"rebasin: the model config .* names no units"):
        merged_by("rebasin", tmp_path)


def register_small_model_with_lora_files() -> None:
    register(from_yaml("identifier: small-test\ncomponents: {x: {keys: {w.weight: [6, 4], v.weight: [3]}}}"))
    register(from_yaml("identifier: small-lora\nadapter: {base: small-test, prefix: lora}"))


def test_a_lora_is_added_to_the_base_at_a_strength_and_extracted(tmp_path: Path):
    register_small_model_with_lora_files()
    model = {"w.weight": torch.randn(6, 4), "v.weight": torch.randn(3)}
    lora = {"lora_w.lora_up.weight": torch.randn(6, 2), "lora_w.lora_down.weight": torch.randn(2, 4)}
    files = {name: str(tmp_path / f"{name}.safetensors") for name in ("base", "lora", "fine")}
    save_file(model, files["base"])
    save_file(lora, files["lora"])

    given = f"models.base={files['base']}", f"models.experts=[{files['lora']}]"
    merged = merged_by("lora", tmp_path, *given, "alpha=0.5")

    wanted = model["w.weight"] + 0.5 * lora["lora_w.lora_up.weight"] @ lora["lora_w.lora_down.weight"]
    torch.testing.assert_close(merged["w.weight"], wanted)
    assert torch.equal(merged["v.weight"], model["v.weight"])

    save_file(merged, files["fine"])
    given = f"models.base={files['base']}", f"models.experts=[{files['fine']}]", "use_approximate_basis=false"
    made = merged_by("extract_lora", tmp_path, *given, "rank=2")

    assert made["lora_w.alpha"] == 2
    torch.testing.assert_close(
        made["lora_w.lora_up.weight"] @ made["lora_w.lora_down.weight"], wanted - model["w.weight"]
    )


NETWORKS = {"rebasin", "lora", "extract_lora"}
"""Recipes of models whose config says more than their keys do."""

WITH_DATA = {"fisher", "rebasin_by_activations", "regmean", "stitch", "zipit"}
"""Recipes that need statistics: their tests are in tests/calibration."""


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in {*FORMULAS, *NETWORKS, *WITH_DATA}])
def test_a_recipe_names_every_hyperparameter_of_its_method_and_merges_the_demo(name: str, tmp_path: Path):
    recipe = composed(f"recipe={name}").recipe  # what the method computes, parity/test_oracles.py says
    signature = resolve_method(recipe.method).signature

    assert {s.name for s in signature.parameters if not s.is_model or s.required} <= recipe.keys()
    merged = merged_by(name, tmp_path)
    assert all(tensor.isfinite().all() for tensor in merged.values())
    assert any(not torch.equal(tensor.double(), base[key]) for key, tensor in merged.items())


LEFT_OUT = {
    "clamp",
    "df_merge",
    "doge",
    "elected_task_arithmetic",
    "emr",
    "emr_mask",
    "emr_unified",
    "fr_merging",
    "iso_cts",
    "knots",
    "localize_and_stitch",
    "magmax",
    "metagpt",
    "model_stock_rows",
    "multislerp",
    "pcb",
    "ramplus",
    "ramplus_tl",
    "star",
    "stitch",
    "tall_mask",
    "tall_mask_of",
    "ties_extended",
    "twin",
    "wudi",
}
"""Of the shootout; its first lines say why. In `clamp` the sum is only what is held between bounds."""


def test_the_shootout_has_every_recipe_that_merges_experts_into_a_base():
    graphs = {name: str(option_values("recipe", name)) for name in RECIPES}
    of_both = {
        name
        for name, graph in graphs.items()
        if "${models.base}" in graph and "'models': '${models.experts}'" in graph
    }
    shootout = OmegaConf.load(CONF / "experiment" / "methods_shootout.yaml")

    assert sorted(shootout.hydra.sweeper.params.recipe.split(",")) == sorted(of_both - LEFT_OUT)

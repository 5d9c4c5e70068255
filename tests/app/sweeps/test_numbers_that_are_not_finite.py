"""Sweeps and runs in which an evaluator gives no finite number for the base, an expert or a point."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp.runs.record import Record, load_all

NOT_FINITE = ("nan", "inf", "-inf")
MODELS = ("base", "expert", "point")
KINDS = [("odd", model, number) for model in MODELS for number in NOT_FINITE]
KINDS += [("odd_by_example", model, "nan") for model in MODELS]

EVALUATOR = '''
import numpy as np

from mecha_exp import Outcomes, evaluator


def score(state_dict, of, gives):
    """The mean weight; another number for the base (0), the expert (1) or a point (any other)."""
    weight = float(state_dict["model.layers.0.w"].mean())
    model = {0.0: "base", 1.0: "expert", 2.0: "other"}.get(weight, "point")
    return float(gives) if model == of else weight


@evaluator("odd", metric="score", direction="maximize")
def odd(state_dict, *, of="nothing", gives="nan"):
    """One number a model."""
    return {"score": score(state_dict, of, gives)}


@evaluator("odd_by_example", metric="score", direction="maximize")
def odd_by_example(state_dict, *, of="nothing", gives="nan"):
    """Numbers by example of two tasks; one of them is not finite."""
    values = score(state_dict, "nothing", 0) + np.linspace(0, 1, 40)
    first = values.copy()
    first[0] = score(state_dict, of, gives)
    return Outcomes({"first": first, "second": values})
'''


@pytest.fixture
def models(folder):
    """A base, two experts and the evaluator, in the current folder."""
    for name, value in {"base": 0.0, "a": 1.0, "b": 2.0}.items():
        layers = {f"model.layers.{n}.w": torch.full((2, 2), value) for n in range(2)}
        save_file(layers, folder / f"{name}.safetensors")
    (folder / "odd.py").write_text(EVALUATOR)
    return folder


WORDS = (
    "recipe=task_arithmetic",
    "models.base=base.safetensors",
    "models.experts=[a.safetensors,b.safetensors]",
    "plugins=[odd.py]",
    "output=none",
    "engine.workers=1",
    "hydra.run.dir=odd",
    "hydra.sweep.dir=odd",
)
SWEEPS = {
    "grid": ["alpha=0.1,0.3"],
    "search": ["sweep=search", "alpha=interval(0.1,0.9)", "sweep.trials=3"],
    "experts": ["sweep=leave_one_expert_out", "alpha=0.3"],
    "blocks": ["sweep=leave_one_block_out", "alpha=0.3"],
    "subsets": ["sweep=subsets", "sweep.sizes=[1,2]", "alpha=0.3"],
    "shapley": ["sweep=shapley", "alpha=0.3"],
    "replicates": ["recipe=dare_linear", "alpha=0.3", "seed=1,2"],
}


def asked(evaluator, model, number, *words):
    return [
        *WORDS,
        f"evaluator.name={evaluator}",
        f"evaluator.of={model}",
        f"evaluator.gives={number}",
        *words,
    ]


@pytest.mark.parametrize(("evaluator", "model", "number"), KINDS)
def test_a_run_ends_and_its_row_says_nan(app, models, evaluator, model, number):
    outcome = app(*asked(evaluator, model, number, "alpha=0.3"))
    record = Record.load(models / "odd")

    assert outcome.status == 0, outcome.err
    rows = {"base": "base", "expert": "a", "point": "task_arithmetic"}
    of = record.metrics if model == "point" else record.references[rows[model]]
    assert not math.isfinite(of["score"]) and all(type(value) is float for value in of.values())
    assert re.search(rf"^ *{rows[model]} +nan", outcome.out, re.M)


@pytest.mark.parametrize(
    ("sweep", "model", "number"),
    [
        *(("grid", *of) for of in zip(MODELS, NOT_FINITE, strict=True)),
        *((sweep, model, "nan") for sweep in SWEEPS if sweep != "grid" for model in MODELS),
    ],
)
def test_a_sweep_ends_and_table_shows_it_again(app, models, sweep, model, number):
    swept = app(*asked("odd", model, number, *SWEEPS[sweep], "-m"))
    again = app("table", "odd")
    as_json = app("table", "odd", "--json")

    assert swept.status == again.status == as_json.status == 0, swept.err + again.err + as_json.err
    assert "nan" in swept.out and "nan" in again.out
    json.loads(as_json.out)
    assert "number that is not finite on 'all', and cannot be compared." in " ".join(again.out.split())
    for record in load_all(models / "odd").values():
        assert all(type(v) is float for of in record.references.values() for v in of.values())


@pytest.mark.parametrize(("model", "number"), [*zip(MODELS, NOT_FINITE, strict=True)])
def test_outcomes_that_are_not_finite_are_not_compared(app, models, model, number):
    swept = app(*asked("odd_by_example", model, number, "alpha=0.1,0.3", "-m"))
    again = app("table", "odd")

    assert swept.status == again.status == 0, swept.err + again.err
    for shown in (swept.out, again.out):
        assert "not finite in the task 'first', and cannot be compared." in " ".join(shown.split())

"""Jobs of all kinds in one call, alone and together, whole and resumed: the same files, to the byte."""

import contextlib
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mecha_exp as mx
from mecha_exp import EngineOptions, Job, merge_many
from mecha_exp.architectures import from_yaml, register
from mecha_exp.method_api.registry import resolve_method

exchange_ema, rename_keys = map(resolve_method, ("exchange_ema", "rename_keys"))

EXPERTS = "model.layers.0.block_sparse_moe.experts.w1"
CONFIG = """
identifier: toy-NAME
components:
  net:
    keys:
      a.weight: [4, 6]
      ema.weight: [4, 6]
      EXPERTS: {shape: [2, 4, 6], stacked: STACKED}
      bias: [5]
      steps: [3]
""".replace("EXPERTS", EXPERTS)
STACKED, WHOLE = "toy-stacked", "toy-whole"
SHAPES = {"a.weight": (4, 6), "ema.weight": (4, 6), EXPERTS: (2, 4, 6), "bias": (5,), "steps": (3,)}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]

RECIPES = {
    "weighted_sum": lambda a, b: mx.weighted_sum(a, b, alpha=0.3),
    "slerp": lambda a, b: mx.slerp(a, b, alpha=0.3),
    "n_average": lambda a, b: mx.n_average(a, b, a),
    "iso_c": lambda a, b: mx.iso_c(a, b, a),
    "fallback": lambda a, b: a | b,
    "finite": lambda a, b: mx.omit_non_finite(a) | b,
    "finite alone": lambda a, b: mx.omit_non_finite(a),
    "renamed": lambda a, b: mx.weighted_sum(
        rename_keys(a, "a.weight -> ema.weight, ema.weight -> a.weight, * -> *"), b, alpha=0.3
    ),
    "other keys": lambda a, b: rename_keys(a, "bias -> a.weight, steps -> bias, * -> steps"),
    "exchanged": lambda a, b: exchange_ema(mx.weighted_sum(a, b, alpha=0.3)),
    "by key": lambda a, b: mx.weighted_sum(a, b, alpha={"bias": 0.7, "default": 0.2}),
}
"""Recipes of two models, of every kind that decides about keys in its own way."""


@st.composite
def forms(draw):
    """The key, shape and dtype of each tensor of some models, their config, and where they are spoilt."""
    dtypes = {key: draw(st.sampled_from(DTYPES[:4])) for key in SHAPES}
    dtypes["steps"] = draw(st.sampled_from(DTYPES))
    return {"shapes": dict(SHAPES), "dtypes": dtypes, "config": STACKED, "spoilt": None}


@st.composite
def changed(draw, form):
    """A form that differs from another one in one way, or in none."""
    shapes, dtypes = dict(form["shapes"]), dict(form["dtypes"])
    key = draw(st.sampled_from([*shapes]))
    way = draw(st.sampled_from(["none", "order", "shape", "key", "dtype", "config", "spoilt"]))
    if way == "order":
        shapes = {key: shapes.pop(key), **shapes}
    elif way == "shape":
        shapes[key] = (*shapes[key][:-1], shapes[key][-1] + 1)
    elif way == "key":
        del shapes[key]
    elif way == "dtype":
        dtypes[key] = draw(st.sampled_from(DTYPES))
    config = {"config": WHOLE, "shape": None, "key": None}.get(way, STACKED)
    return {
        "shapes": shapes,
        "dtypes": dtypes,
        "config": config,
        "spoilt": key if way == "spoilt" else None,
    }


def model_of(form, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = {key: torch.randn(shape, generator=generator) for key, shape in form["shapes"].items()}
    made = {key: (3 * values).to(form["dtypes"][key]) for key, values in drawn.items()}
    if form["spoilt"] and made[form["spoilt"]].is_floating_point():
        made[form["spoilt"]].view(-1)[0] = torch.nan
    return mx.model(made, form["config"])


@st.composite
def passes(draw):
    """The forms of six models, two of each form, and jobs: recipe, its two models, whether it is measured."""
    first = draw(forms())
    kinds = [first, draw(changed(first)), draw(changed(first))]
    number = st.integers(0, 5)
    job = st.tuples(st.sampled_from([*RECIPES]), number, number, st.booleans())
    return kinds * 2, draw(st.lists(job, min_size=2, max_size=4))


OPTIONS = st.builds(
    EngineOptions,
    workers=st.sampled_from([1, 2]),
    tile_size=st.sampled_from([64, 1 << 12]),
    on_nonfinite=st.sampled_from(["keep", "skip", "error"]),
    on_missing=st.sampled_from(["base", "skip", "error"]),
    stacked_experts=st.sampled_from(["auto", "auto", "split"]),
    fuse=st.just("never"),
)


@pytest.fixture
def toys(registries):
    register(from_yaml(CONFIG.replace("NAME", "stacked").replace("STACKED", "true")))
    register(from_yaml(CONFIG.replace("NAME", "whole").replace("STACKED", "false")))


def made(jobs, options, folder, progress=lambda key, nbytes: None):
    """The bytes of each job's file, and what the report says of each; None where something is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    named = [replace(job, output=folder / f"{number}.safetensors") for number, job in enumerate(jobs)]
    try:
        report = merge_many(named, options, progress)
    except mx.MechaError:
        return None
    moments = [
        {model: {key: str(sums.tolist()) for key, sums in keys.items()} for model, keys in each.items()}
        for each in report.moments
    ]
    files = [job.output.read_bytes() for job in named]
    return [*zip(files, report.nonfinite_values, moments, strict=True)]


def interrupted(after):
    """A listener that interrupts a merge when so many keys have been heard of."""
    heard = set()

    def listen(key, nbytes):
        heard.add(key)
        if len(heard) == after:
            raise KeyboardInterrupt

    return listen


@settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.generate],
)
@given(drawn=passes(), options=OPTIONS, after=st.integers(1, 4))
def test_together_each_is_what_it_is_alone(toys, tmp_path_factory, drawn, options, after):
    models = [model_of(form, seed) for seed, form in enumerate(drawn[0])]
    jobs = [
        Job(RECIPES[name](models[a], models[b]), statistics=measured, metadata={})
        for name, a, b, measured in drawn[1]
    ]
    folder = tmp_path_factory.mktemp("pass")
    alone = [made([job], options, folder / "alone") for job in jobs]
    allowed = [(job, result[0]) for job, result in zip(jobs, alone, strict=True) if result]
    jobs, expected = [job for job, _ in allowed], [result for _, result in allowed]

    assert made(jobs, options, folder / "together") == expected
    assert made(jobs[::-1], options, folder / "reversed") == expected[::-1]
    with contextlib.suppress(KeyboardInterrupt):
        made(jobs, options, folder / "resumed", interrupted(after))
    resumed = made(jobs, replace(options, workers=4, tile_size=128), folder / "resumed")
    assert [file for file, *_ in resumed] == [file for file, *_ in expected]

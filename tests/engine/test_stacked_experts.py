"""Experts that lie stacked in one key are merged one by one, as keys of their own are."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_calls import METHODS, models_in, recipe_of
from safetensors.torch import load_file, save_file
from state_dicts import same

import mecha_exp as mx
from mecha_exp import EngineOptions, Job, Parameter, Return, Tile, merge_many, merge_method, random
from mecha_exp.architectures import from_yaml, register, to_yaml
from mecha_exp.engine.merge import run_plan

LAYER = "model.layers.0"
DOWN = f"{LAYER}.mlp.experts.down_proj"
BIAS = f"{LAYER}.mlp.experts.gate_up_proj_bias"
KNOWN = {
    f"{LAYER}.mlp.experts.gate_up_proj": (4, 12, 8),
    DOWN: (4, 8, 6),
    f"{LAYER}.feed_forward.experts.gate_up_proj": (4, 8, 12),
    BIAS: (4, 12),
    f"{LAYER}.mixer.experts.up_proj": (1, 12, 8),
    f"{LAYER}.mlp.input_linear.weight": (4, 12, 8),
}
LIKELY = {
    f"{LAYER}.block_sparse_moe.experts.w1": (4, 12, 8),
    f"{LAYER}.mlp.experts.w1_bias": (4, 12),
    f"{LAYER}.mlp.experts.gate_up_proj": (4, 2, 3, 8),
}
PLAIN = {
    f"{LAYER}.mlp.experts.0.gate_proj.weight": (12, 8),
    f"{LAYER}.mlp.experts.0.down_proj": (4, 12, 8),
    f"{LAYER}.mlp.shared_experts.down_proj.weight": (12, 8),
    f"{LAYER}.mlp.gate.weight": (4, 8),
    "conv.weight": (4, 3, 3),
    "pos_embed": (1, 5, 8),
}
RECIPES = {
    "iso_c": lambda base, *experts: mx.iso_c(base, *experts),
    "tsv_m": lambda base, *experts: mx.tsv_m(base, *experts),
    "ties": lambda base, *experts: mx.add_difference_ties(base, *experts, k=0.3),
    "slerp": lambda base, *experts: mx.slerp(base, experts[0], alpha=0.3),
    "model_stock": lambda base, *experts: mx.model_stock_pairwise(base, *experts),
    "model_stock by rows": lambda base, *experts: mx.model_stock_pairwise(base, *experts, filter_wise=True),
    "rotate": lambda base, *experts: mx.rotate(*experts[:2], base, alpha=0.3),
    "truncate_rank": lambda base, *experts: mx.add_difference(
        base, mx.truncate_rank(mx.subtract(experts[0], base), rank=2, use_approximate_basis=False)
    ),
    "dare_ties": lambda base, *experts: mx.dare_ties(
        base, *experts, density=0.5, k=0.6, rescale="l1", seed=3
    ),
    "tensor_sum": lambda base, *experts: mx.tensor_sum(base, experts[0], width=0.4),
}


def drawn(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def unstacked(model):
    """A key for each expert: `mlp.experts.down_proj[2]`."""
    return {
        (f"{key}[{expert}]" if key in KNOWN else key): part
        for key, tensor in model.items()
        for expert, part in enumerate(tensor if key in KNOWN else tensor[None])
    }


def stacked(model):
    parts = {}
    for key, tensor in model.items():
        parts.setdefault(key.partition("[")[0], []).append(tensor)
    return {key: torch.stack(tensors) if key in KNOWN else tensors[0] for key, tensors in parts.items()}


@pytest.fixture
def draws_of_stacks(monkeypatch):
    """The draws of the key `name[3]` are those of the fourth expert of the stack `name`."""
    original = random.uniforms

    def uniforms(key, start, stop, seed, stream):
        stack, _, place = key.removesuffix("]").partition("[")
        offset = int(place) * math.prod(KNOWN[stack][1:]) if place else 0
        return original(stack, offset + start, offset + stop, seed, stream)

    monkeypatch.setattr(random, "uniforms", uniforms)


# --- the result ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_stack_is_merged_as_a_key_for_each_expert_is(name, draws_of_stacks):
    models = [drawn({**KNOWN, **PLAIN}, seed) for seed in range(3)]

    merged = mx.merge(RECIPES[name](*models))

    assert same(merged, stacked(mx.merge(RECIPES[name](*map(unstacked, models)))))


TAKEN = [method for method in METHODS if method.identifier != "knots"]
"""All but what is refused there: KnOTS counts coordinates of the whole model (tests/test_knots.py)."""


def test_so_it_is_by_every_method(tmp_path, draws_of_stacks):
    shapes = {key: (KNOWN[key], torch.float32) for key in (DOWN, BIAS)}
    files = models_in(tmp_path, shapes)
    apart = [f"{path}.apart.safetensors" for path in files]
    for path, other in zip(files, apart, strict=True):
        save_file({key: part.clone() for key, part in unstacked(load_file(path)).items()}, other)

    def results(paths):
        jobs = [Job(recipe_of(method, paths), {}) for method in TAKEN]
        merge_many(jobs, EngineOptions(fuse="never", on_nonfinite="keep"))
        return [{key: tensor.nan_to_num() for key, tensor in job.output.items()} for job in jobs]

    pairs = zip(TAKEN, results(files), map(stacked, results(apart)), strict=True)
    assert [method.identifier for method, one, other in pairs if not same(one, other)] == []


@settings(max_examples=15)
@given(
    shape=st.lists(st.integers(1, 7), min_size=3, max_size=3),
    name=st.sampled_from(["ties", "slerp", "model_stock by rows", "iso_c", "tensor_sum"]),
    seed=st.integers(0, 99),
)
def test_stacks_of_any_shape_are(shape, name, seed):
    models = [drawn({DOWN: tuple(shape)}, seed + i) for i in range(3)]

    merged = mx.merge(RECIPES[name](*models))

    assert same(merged, stacked(mx.merge(RECIPES[name](*map(unstacked, models)))))


def test_a_stack_without_experts_is_empty():
    assert mx.merge(RECIPES["ties"](*[{DOWN: torch.zeros(0, 8, 6)}] * 3))[DOWN].shape == (0, 8, 6)


def test_entries_one_by_one_are_merged_at_once():
    recipe = mx.dare_linear(*[drawn(KNOWN, seed) for seed in range(3)])

    with mx.plan([Job(recipe, {})]) as plan:
        assert {key.experts for key in plan.keys} == {None}
        assert plan.warnings == ()


def test_draws_are_those_of_the_whole_key():
    models = [drawn({DOWN: KNOWN[DOWN]}, seed) for seed in range(3)]
    linear, trimmed = (merge(*models, density=0.5, seed=1) for merge in (mx.dare_linear, mx.dare_ties))

    kept = [mx.merge(recipe)[DOWN] != models[0][DOWN] for recipe in (linear, trimmed)]

    assert torch.equal(*kept)


def test_memory_is_that_of_one_expert():
    shapes = {DOWN: (16, 64, 64)}
    recipe = mx.iso_c(*[drawn(shapes, seed) for seed in range(3)], variant="rows")

    with mx.plan([Job(recipe, {})]) as plan, mx.plan([Job(recipe, {})], WHOLE) as together:
        assert 16 * plan.whole_bytes == together.whole_bytes


# --- runs ------------------------------------------------------------------------------------------------

WHOLE, SPLIT = EngineOptions(stacked_experts="whole"), EngineOptions(stacked_experts="split")
MIXTURE = {
    "embed.weight": (9, 8),
    f"{LAYER}.mlp.experts.gate_up_proj": (3, 520, 130),  # of more than a block of a reduction
    DOWN: (3, 8, 6),
    BIAS: (3, 12),
    "norm.weight": (8,),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    for seed in range(3):
        save_file(drawn(MIXTURE, seed), folder / f"{seed}.safetensors")
    return [str(folder / f"{seed}.safetensors") for seed in range(3)]


def sweep(files, folder):
    recipes = {
        "mean": mx.n_average(*files),
        "dare": mx.dare_linear(*files, density=0.4),
        "ties": mx.add_difference_ties(*files, k=0.3),
        "slerp": mx.slerp(*files[:2]),
        "rotate": mx.rotate(*files[:2]),
    }
    return {
        n: Job(r, folder / f"{n}.safetensors", durable=False, statistics=True) for n, r in recipes.items()
    }


def test_points_of_a_sweep_are_what_each_is_alone(files, tmp_path):
    options = EngineOptions(fuse="always", workers=2, tile_size=1 << 13)
    together = sweep(files, tmp_path)
    report = merge_many(list(together.values()), options)

    (tmp_path / "alone").mkdir()
    for place, (name, job) in enumerate(sweep(files, tmp_path / "alone").items()):
        alone = merge_many([job], EngineOptions(fuse="never", workers=1))
        assert job.output.read_bytes() == together[name].output.read_bytes(), name
        moments = [dict(moments) for moments in alone.moments[0].values()]
        assert all(map(same, moments, report.moments[place].values())), name


def test_statistics_are_those_of_the_whole_key(files):
    (report,) = [merge_many([Job(mx.slerp(*files[:2]), merged := {}, statistics=True)])]

    for model, moments in report.moments[0].items():
        stored = load_file(model.source)
        expected = [(merged[DOWN].double() - stored[DOWN].double()).square().sum().item()]
        assert moments[DOWN].tolist()[2:] == pytest.approx(expected, rel=1e-12)


def test_progress_counts_every_byte_once(files):
    heard = []
    with mx.plan([Job(mx.add_difference_ties(*files, k=0.3), {})]) as plan:
        run_plan(plan, lambda key, nbytes: heard.append((key, nbytes)))

        for key in plan.keys:
            assert sum(nbytes for name, nbytes in heard if name == key.key) == plan.bytes_of(key)


@pytest.mark.parametrize("call", [1, 2, 3, 5, 8, 12])
def test_a_merge_that_is_interrupted_amid_a_stack_goes_on(call, files, tmp_path):
    options = EngineOptions(fuse="never", workers=1)
    job, other = (Job(RECIPES["slerp"](*files), tmp_path / f"{name}.safetensors") for name in "ab")
    calls = itertools.count(1)

    def interrupt(key, nbytes):
        if next(calls) == call:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_many([job], options, interrupt)
    merge_many([job], options)
    merge_many([other], options)

    assert same(load_file(job.output), load_file(other.output))


def test_what_is_finished_is_not_done_again(files, tmp_path):
    job = Job(mx.slerp(*files[:2]), tmp_path / "out.safetensors")

    def interrupt(key, nbytes):
        if key == "norm.weight":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_many([job], EngineOptions(workers=1), interrupt)

    assert merge_many([job], EngineOptions(workers=1)).resumed_keys >= 3


def test_too_large_a_value_and_none_at_all_are_told_by_expert(files, tmp_path):
    broken = load_file(files[0])
    broken[DOWN][2, 1, 1] = torch.nan

    with pytest.raises(mx.MergeError, match=r"the key '.*down_proj\[2\]' has values that are not finite"):
        mx.merge(mx.slerp(broken, files[1]))


# --- methods that look around ----------------------------------------------------------------------------


def test_a_method_sees_an_expert_as_a_tensor_of_its_own():
    seen = []

    @merge_method(register=False)
    def noted(a: Parameter(torch.Tensor), **kwargs) -> Return(torch.Tensor):
        kwargs["cache"].setdefault(kwargs["key"], a.clone())
        return kwargs["cache"][kwargs["key"]]

    @merge_method(elementwise=True, register=False)
    def placed(a: Parameter(torch.Tensor), tile: Tile) -> Return(torch.Tensor):
        seen.append((tile.name, tile.offset, tile.start, tile.stop, tile.shape))
        return a + torch.arange(tile.start, tile.stop)

    model = drawn({DOWN: (2, 3, 5)}, 0)
    recipe = noted(model)
    merge_many([Job(placed(recipe), merged := {}, caches={recipe: (cache := {})})])

    assert torch.equal(merged[DOWN], model[DOWN] + torch.arange(15.0).reshape(3, 5))
    assert cache.keys() == {f"{DOWN}[0]", f"{DOWN}[1]"}
    assert sorted(seen[-2:]) == [(f"{DOWN}[{i}]", 15 * i, 0, 15, (3, 5)) for i in range(2)]


@merge_method(register=False)
def passed(a: Parameter(mx.StateDict[torch.Tensor]), **kwargs) -> Return(torch.Tensor):
    """a, by a method that asks for keys."""
    return a[kwargs["key"]]


def test_stacks_are_split_below_and_above_a_method_that_asks_for_other_keys():
    models = [drawn({DOWN: (3, 8, 6), "plain": (4, 4)}, seed) for seed in range(3)]
    direct = mx.merge(mx.add_difference_ties(*models, k=0.3))

    assert same(mx.merge(passed(mx.add_difference_ties(*models, k=0.3))), direct)
    assert same(mx.merge(mx.add_difference_ties(models[0], *map(passed, models[1:]), k=0.3)), direct)


def test_a_tensor_in_a_recipe_has_a_part_for_each_expert():
    models = [drawn({DOWN: (3, 8, 6)}, seed) for seed in range(2)]
    alpha = drawn({DOWN: (3, 8, 6)}, 7)[DOWN].sigmoid()
    blended = mx.merge(mx.weighted_sum(*models, alpha=alpha))

    merged = mx.merge(mx.slerp(mx.weighted_sum(*models, alpha=alpha), models[1]))

    assert same(merged, mx.merge(mx.slerp(blended, models[1])))


def test_values_by_block_hold_for_all_experts_of_a_key():
    keys = [f"model.layers.{i}.mlp.experts.down_proj" for i in range(2)]
    a, b = (drawn(dict.fromkeys(keys, (3, 8, 6)), seed) for seed in range(2))

    merged = mx.merge(mx.slerp(a, b, alpha={"0": 0.2, "1": 0.7}))

    for key, alpha in zip(keys, (0.2, 0.7), strict=True):
        assert torch.equal(merged[key], mx.merge(mx.slerp({key: a[key]}, {key: b[key]}, alpha=alpha))[key])


# --- which keys are stacks -------------------------------------------------------------------------------


def experts_of(key, shape, recipe=RECIPES["slerp"], options=None):
    models = [drawn({key: shape}, seed) for seed in range(3)]
    with mx.plan([Job(recipe(*models), {})], options) as plan:
        return plan.keys[0].experts, [str(notice) for notice in plan.warnings]


@pytest.mark.parametrize(("key", "shape"), KNOWN.items())
def test_the_plan_names_known_stacks(key, shape):
    experts, (notice,) = experts_of(key, shape)

    assert experts == shape[0]
    assert notice == f"1 key holds several experts, which are merged one by one: {key}"


@pytest.mark.parametrize("name", ["tsv_m", "ties", "slerp", "model_stock by rows"])
@pytest.mark.parametrize(("key", "shape"), [*LIKELY.items()][:2])
def test_what_looks_like_a_stack_is_refused_where_it_matters(name, key, shape):
    with pytest.raises(mx.RecipeError, match="1 key looks like several experts in one tensor") as refused:
        experts_of(key, shape, RECIPES[name])
    assert key in str(refused.value)
    assert "stacked_experts=split" in str(refused.value)
    assert "stacked_experts=whole" in str(refused.value)
    assert "'stacked: true'" in str(refused.value)


@pytest.mark.parametrize(("key", "shape"), [*LIKELY.items()][:2])
def test_it_is_merged_as_the_option_says(key, shape):
    assert experts_of(key, shape, options=SPLIT)[0] == shape[0]
    assert experts_of(key, shape, options=WHOLE) == (None, [])
    assert experts_of(key, shape, lambda *models: mx.n_average(*models)) == (None, [])


def test_known_stacks_are_taken_together_on_request():
    models = [drawn({DOWN: (3, 8, 6)}, seed) for seed in range(3)]
    flat = [{"matrix": model[DOWN].flatten(1)} for model in models]

    merged = mx.merge(RECIPES["slerp"](*models), options=WHOLE)[DOWN]

    assert torch.equal(merged.flatten(1), mx.merge(RECIPES["slerp"](*flat))["matrix"])


@pytest.mark.parametrize(("key", "shape"), [*PLAIN.items(), [*LIKELY.items()][2]])
def test_other_tensors_are_what_they_are(key, shape):
    assert experts_of(key, shape) == (None, [])


CONFIG = """
identifier: toy-mixture
sizes: {experts: 2, hidden: 6}
components:
  net:
    keys:
      bank.{0,1}: {shape: [experts, 4, hidden], stacked: STACKED}
      experts.down_proj: {shape: [experts, 4, hidden], stacked: STACKED}
      experts.up_proj: [experts, 4, hidden]
      out.weight: [hidden, hidden]
"""
VECTORS = """
identifier: toy-vectors
components:
  net:
    keys:
      gains.weight: {shape: [4, 6], stacked: true}
      out.weight: [6, 6]
"""


@pytest.mark.parametrize("is_stack", [True, False])
def test_the_model_config_decides(is_stack):
    config = from_yaml(CONFIG.replace("STACKED", str(is_stack).lower()))
    register(config)
    stacks = ("bank.0", "bank.1", "experts.down_proj", "experts.up_proj")
    models = [drawn({**dict.fromkeys(stacks, (3, 4, 6)), "out.weight": (6, 6)}, seed) for seed in range(2)]

    with mx.plan([Job(mx.slerp(*models), {})]) as plan:
        experts = {key.key: key.experts for key in plan.keys}

    marked = dict.fromkeys(stacks[:3], 3 if is_stack else None)
    assert experts == {
        **marked,
        "experts.up_proj": 3,
        "out.weight": None,
    }  # where it says nothing, the name does
    assert from_yaml(to_yaml(config)).keys() == config.keys()


def test_a_config_that_marks_other_keys_is_another_config():
    one, other = (from_yaml(CONFIG.replace("STACKED", word)) for word in ("true", "false"))

    assert one.digest != other.digest


def test_a_vector_is_no_stack():
    with pytest.raises(mx.ConfigError, match=r"norm.*\[6\] cannot be a stack, whose first axis counts"):
        from_yaml(
            CONFIG.replace("      out.weight", "      norm: {shape: [6], stacked: true}\n      out.weight")
        )


def test_experts_of_vectors_have_no_common_scale(tmp_path):
    register(from_yaml(VECTORS))
    models = [drawn({"gains.weight": (4, 6), "out.weight": (6, 6)}, seed) for seed in range(2)]
    job = Job(mx.slerp(*models), tmp_path / "out.safetensors", quantize="fp8_scaled")

    with pytest.raises(mx.RecipeError, match=r"'gains\.weight' holds several experts and cannot be"):
        merge_many([job])

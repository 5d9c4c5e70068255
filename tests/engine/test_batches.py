"""Jobs share a pass only where each comes to the same bytes as it does alone."""

from functools import partial
from pathlib import Path

import pytest
import torch
from state_dicts import contents, random_model
from torch import Tensor

import mecha_exp as mx
from mecha_exp import Parameter, Return, StateDict, merge_method
from mecha_exp.architectures import from_yaml, register
from mecha_exp.engine import EngineOptions, Job, merge_many, plan
from mecha_exp.engine.planner.batches import batches
from mecha_exp.errors import CheckpointError, MergeError
from mecha_exp.method_api.registry import resolve_method

OPTIONS = EngineOptions()
rename_keys = resolve_method("rename_keys")


def mean(*state_dicts):
    return mx.n_average(*map(mx.model, state_dicts))


def alone_and_together(*recipes, options=OPTIONS):
    """What each recipe makes by itself, and what all of them make at once."""
    alone, together = [{} for _ in recipes], [{} for _ in recipes]
    for recipe, made in zip(recipes, alone, strict=True):
        merge_many([Job(recipe, made)], options)
    report = merge_many([Job(recipe, made) for recipe, made in zip(recipes, together, strict=True)], options)
    return alone, together, report


HALVES = [torch.float16, torch.float32, torch.float16]
WIDE = {"conv_in": ((8, 9), torch.float32)}
NARROW = {"conv_in": ((8, 4), torch.float32)}


@pytest.mark.parametrize("order", [1, -1])
def test_models_of_other_shapes_have_a_pass_of_their_own(order):
    wide = [random_model(seed, **WIDE) for seed in (1, 2)]
    narrow = [random_model(seed, **NARROW) for seed in (3, 4)]

    alone, together, report = alone_and_together(*[mean(*wide), mean(*narrow)][::order])

    assert [*map(contents, together)] == [*map(contents, alone)]
    assert {made["conv_in"].shape for made in together} == {(8, 9), (8, 4)}
    assert len(report.nonfinite_values) == len(report.moments) == 2
    assert report.keys == 2 * len(wide[0])


STACKED = """
identifier: toy-NAME
components:
  net:
    keys:
      model.layers.0.block_sparse_moe.experts.w1: {shape: [2, 4, 6], stacked: STACKED}
"""
EXPERTS = {"model.layers.0.block_sparse_moe.experts.w1": ((2, 4, 6), torch.float32)}


SHAPES = {"w": (6, 4), "v": (5,)}


def drawn(seed, config=None, *, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    tensors = {key: 3 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return mx.model({key: tensor.to(dtype) for key, tensor in tensors.items()}, config)


def of_dtype(seed, dtype):
    return mx.weighted_sum(drawn(seed, dtype=dtype), drawn(seed + 1, dtype=dtype), alpha=0.3)


def of_experts(seed, name):
    shapes = {key: shape for key, (shape, _) in EXPERTS.items()}
    return mx.slerp(drawn(seed, f"toy-{name}", shapes=shapes), drawn(seed + 1, f"toy-{name}", shapes=shapes))


def other_keys(seed):
    return rename_keys(drawn(seed), "w -> v, v -> w")


def by_an_interface(seed):
    @merge_method(is_interface=True)
    def turned(a: Parameter(Tensor)) -> Return(Tensor): ...

    @merge_method(implements=turned)
    def turned_in_keys(a: Parameter(StateDict[Tensor]), **kwargs) -> Return(Tensor):
        return a[{"w": "v", "v": "w"}[kwargs["key"]]]

    return turned(drawn(seed))


def spoilt(seed):
    tensors = {"w": torch.full((6, 4), torch.nan), "v": torch.ones(5)}
    return mx.weighted_sum(mx.model(tensors), drawn(seed), alpha=0.3)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "one, other",
    [
        (partial(of_experts, name="stacked"), partial(of_experts, name="whole")),
        (partial(of_dtype, dtype=torch.float64), partial(of_dtype, dtype=torch.float32)),
        (partial(of_dtype, dtype=torch.float64), partial(of_dtype, dtype=torch.float16)),
        (partial(of_dtype, dtype=torch.float16), partial(of_dtype, dtype=torch.bfloat16)),
        (other_keys, partial(of_dtype, dtype=torch.float32)),
        (by_an_interface, partial(of_dtype, dtype=torch.float32)),
        (spoilt, partial(of_dtype, dtype=torch.float32)),
    ],
    ids=["config", "float64", "float64 and half", "halves", "other keys", "an interface", "not finite"],
)
def test_jobs_that_differ_in_what_decides_give_what_each_gives_alone(one, other, order):
    for name, stacked in (("stacked", "true"), ("whole", "false")):
        register(from_yaml(STACKED.replace("NAME", name).replace("STACKED", stacked)))

    options = EngineOptions(on_nonfinite="skip", on_missing="base") if one is spoilt else OPTIONS
    alone, together, _ = alone_and_together(*[one(seed=1), other(seed=5)][::order], options=options)

    assert [*map(contents, together)] == [*map(contents, alone)]
    assert [[*made] for made in together] == [[*made] for made in alone]


@pytest.mark.parametrize("first", [torch.int64, torch.bool, torch.uint8], ids=str)
def test_jobs_over_integers_share_a_pass(first):
    def recipe(seed, dtype):
        return mx.weighted_sum(drawn(seed, dtype=dtype), drawn(seed, dtype=dtype), alpha=0.3)

    recipes = recipe(1, first), recipe(2, torch.int32)
    alone, together, _ = alone_and_together(*recipes)

    assert batches(recipes, OPTIONS) == [(0, 1)]
    assert [*map(contents, together)] == [*map(contents, alone)]


def test_what_is_copied_for_one_job_is_computed_for_another():
    counted = [{"step": torch.tensor([number])} for number in (1, 2)]
    measured = [{"step": torch.tensor([float(number)])} for number in (1, 2)]

    _, (first, second), _ = alone_and_together(mean(*counted), mean(*measured))

    assert first["step"].tolist() == [1]
    assert second["step"].tolist() == [1.5]


def test_a_file_has_the_order_of_its_own_models(save, tmp_path: Path):
    keys = ["a", "b", "c"]
    ascending = [save(f"up{n}", {key: torch.full((3,), float(n)) for key in keys}) for n in (1, 2)]
    other = [
        save(f"mixed{n}", {key: torch.full((3,), n, dtype=d) for key, d in zip(keys, HALVES, strict=True)})
        for n in (3, 4)
    ]
    paths = [tmp_path / "alone.safetensors", tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    recipes = [mx.n_average(*map(mx.model, models)) for models in (ascending, other)]

    merge_many([Job(recipes[1], paths[0], metadata={})])
    merge_many([Job(recipe, path, metadata={}) for recipe, path in zip(recipes, paths[1:], strict=True)])

    assert paths[2].read_bytes() == paths[0].read_bytes()


def test_models_that_are_alike_share_a_pass():
    a, b, c = (mx.model(random_model(seed)) for seed in (1, 2, 3))
    recipes = [mx.n_average(a, b), mx.n_average(a, b, c), mx.weighted_sum(c, b, alpha=0.3)]

    assert batches(recipes, OPTIONS) == [(0, 1, 2)]
    assert batches([], OPTIONS) == []


def test_models_that_differ_share_a_pass_if_all_jobs_read_them_in_one_order():
    a, b = mx.model(random_model(1)), mx.model(random_model(2, extra=((3,), torch.float32)))
    recipes = [mx.weighted_sum(a, b, alpha=0.3), mx.slerp(a, b), mx.weighted_sum(b, a)]

    assert batches(recipes, OPTIONS) == [(0, 1), (2,)]


def test_a_model_without_its_spoilt_keys_is_not_that_of_another_job():
    spoilt, sound = random_model(1), random_model(2)
    spoilt["norm.scale"][0] = torch.nan
    a, b = mx.model(spoilt), mx.model(sound)
    recipes = [mx.omit_non_finite(a) | b, mx.n_average(a, a)]

    assert batches(recipes, OPTIONS) == [(0,), (1,)]


def test_a_file_that_is_not_there_is_for_the_plan_to_tell(save):
    a = mx.model(save("a", random_model(1)))
    recipes = [mx.n_average(a, a), mx.n_average(a, mx.model("nowhere.safetensors"))]

    assert batches(recipes, OPTIONS) == [(0,), (1,)]


def test_a_plan_is_one_pass():
    jobs = [Job(mean(random_model(1, **WIDE))), Job(mean(random_model(2, **NARROW)))]

    with pytest.raises(MergeError, match="cannot be merged in one pass"), plan(jobs):
        pass


def test_no_pass_writes_what_another_one_reads(save, tmp_path: Path):
    wide, narrow = save("wide", random_model(1, **WIDE)), save("narrow", random_model(2, **NARROW))
    jobs = [Job(mx.n_average(mx.model(wide)), Path(narrow)), Job(mx.n_average(mx.model(narrow)), {})]
    before = Path(narrow).read_bytes()

    with pytest.raises(CheckpointError, match="is the input"):
        merge_many(jobs)
    assert Path(narrow).read_bytes() == before


def test_a_pair_of_recipe_and_output_is_a_job():
    a, made = random_model(1), {}

    merge_many([(mean(a), made)])

    assert contents(made) == contents(a)


def test_an_output_of_another_kind_is_refused():
    with pytest.raises(MergeError, match="of type int: expected a path, a dictionary"):
        Job(mean(random_model(1)), 3)


def test_what_a_function_is_given_can_be_changed():
    received = {}

    merge_many([Job(mean(random_model(1)), received.__setitem__)])
    received["proj.weight"] += 1

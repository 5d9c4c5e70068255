"""Factors: what whole-tensor methods share of a key, found once for all points of a sweep."""

import math

import pytest
import torch
from torch import Tensor

import mecha_exp as mx
from mecha_exp import Parameter, Return, merge_method
from mecha_exp.engine.planner.planner import plan
from mecha_exp.methods import subspaces


@pytest.fixture
def decomposed():
    """A factor that counts its calls, and two methods that use it."""
    calls = []

    def decomposition(a: Parameter(Tensor)) -> Return(Tensor, "param"):
        calls.append(a.shape)
        return torch.linalg.svd(a.flatten(1), full_matrices=False)

    def low_rank(a: Parameter(Tensor), svd: Parameter(Tensor, "param"), rank: Parameter(int)) -> Return(
        Tensor
    ):
        u, s, v = svd
        return (u[:, :rank] * s[:rank] @ v[:rank]).reshape(a.shape)

    def elements(shape):
        return 2 * math.prod(shape)

    factor = mx.factor(elements=elements)(decomposition)
    return calls, factor, merge_method(register=False)(low_rank)


def test_the_points_of_a_sweep_share_one_factor(decomposed):
    calls, svd, low_rank = decomposed
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    node = mx.model({"w": tensor})
    jobs = [mx.Job(low_rank(node, svd(node), rank=rank), {}) for rank in (1, 3, 5)]

    mx.merge_many(jobs)

    assert calls == [(6, 5)]
    u, s, v = torch.linalg.svd(tensor)
    for job, rank in zip(jobs, (1, 3, 5), strict=True):
        torch.testing.assert_close(job.output["w"], u[:, :rank] * s[:rank] @ v[:rank])


def test_a_factor_counts_in_the_memory_budget(decomposed):
    _, svd, low_rank = decomposed
    node = mx.model({"w": torch.ones(100, 100)})
    options = mx.EngineOptions(memory_budget=4 * 100 * 100 * 3)

    with pytest.raises(mx.MergeError, match="needs 160,000 bytes for whole tensors"):
        mx.merge(low_rank(node, svd(node), rank=2), options=options)


def test_whole_tensors_are_held_no_longer_than_they_are_needed():
    @merge_method(register=False)
    def doubled(a: Parameter(Tensor)) -> Return(Tensor):
        return a + a

    node = mx.model({"w": torch.ones(100, 100)})
    for _ in range(5):
        node = doubled(node)

    with mx.plan([mx.Job(node, {})]) as planned:
        assert planned.whole_bytes == 2 * 4 * 100 * 100  # what goes in, and what comes out
    assert mx.merge(node)["w"].unique().item() == 32


def test_the_size_of_a_factor_may_depend_on_its_hyperparameters():
    @mx.factor(elements=lambda shape, *, share: math.prod(shape) // share)
    def first_rows(a: Parameter(Tensor), share: Parameter(int)) -> Return(Tensor, "param"):
        return a[: len(a) // share]

    @merge_method(register=False)
    def above(a: Parameter(Tensor), rows: Parameter(Tensor, "param")) -> Return(Tensor):
        return torch.where(torch.arange(len(a)).unsqueeze(1) < len(rows), a, 0)

    node = mx.model({"w": torch.ones(100, 100)})
    recipe = above(node, first_rows(node, share=4))

    with mx.plan([mx.Job(recipe, {})]) as planned:
        assert planned.whole_bytes == 4 * (100 * 100 * 2 + 100 * 25)
    assert mx.merge(recipe)["w"].sum(1).tolist() == [100.0] * 25 + [0.0] * 75


def test_a_factor_that_makes_nothing_of_a_shape_is_not_called_and_its_tiles_are_not_kept():
    calls = []

    @mx.factor(elements=lambda shape: math.prod(shape) if len(shape) == 2 else None)
    def squared(a: Parameter(Tensor)) -> Return(Tensor, "param"):
        calls.append(a.shape)
        return (a @ a.mT,) if a.ndim == 2 else ()

    @merge_method(register=False)
    def made(a: Parameter(Tensor), parts: Parameter(Tensor, "param")) -> Return(Tensor):
        return parts[0] if parts else a

    model = mx.model({"w": torch.full((30, 30), 2.0), "b": torch.full((100,), 2.0)})
    recipe = made(mx.n_average(model, model), squared(mx.weighted_sum(model, model, alpha=0.5)))

    with mx.plan([mx.Job(recipe, {})]) as planned:
        assert {key.key: key.structure.own_bytes for key in planned.keys} == {
            "b": 4 * 100 * 2,  # the average, and what is made of it
            "w": 4 * 900 * 3,  # beside the result of the factor
        }
    merged = mx.merge(recipe)
    assert calls == [(30, 30)]
    assert (merged["w"].unique().item(), merged["b"].unique().item()) == (120.0, 2.0)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("variant", ["paper", "rows"])
@pytest.mark.parametrize("name", ["known_parts", "flattened", "leading_parts", "spectrum_cut"])
def test_built_in_factors_make_nothing_where_they_say_so(name, variant, shape):
    method = getattr(subspaces, name)
    arguments = {"variant": variant, "tasks": 2, "eta": 40.0}
    given = {n: v for n, v in arguments.items() if n in method.signature.names}

    made = method.__wrapped__(torch.ones(shape), **given, key="layer.weight")

    assert (method.size(shape, given) is None) == (made == ())


CALLS = {
    "tsv_m": lambda *models: mx.tsv_m(*models),
    "tsv_m of a merge": lambda *models: mx.tsv_m(models[0], mx.tsv_m(*models), models[1]),
    "tsv_m of rows": lambda *models: mx.tsv_m(*models, variant="rows"),
    "iso_c": lambda *models: mx.iso_c(*models, scale=0.7),
    "iso_cts": lambda *models: mx.iso_cts(*models),
    "star": lambda *models: mx.star(*models),
    "twin": lambda *models: mx.twin(*models, task=1),
    "twin of nothing": lambda *models: mx.twin(*models, task=1, density=0.0),
    "wudi": lambda *models: mx.wudi(*models, solver="closed"),
    "wudi with the mean": lambda *models: mx.wudi(*models, solver="closed", others="mean"),
    "doge": lambda *models: mx.doge(*models, steps=2, others="mean"),
    "rotate": lambda a, b, c: mx.rotate(a, b, alignment=0.5, alpha=0.3),
    "rotate by a whole turn": lambda a, b, c: mx.rotate(a, b, alpha=0.3),
    "truncate_rank": lambda a, b, c: mx.add_difference(a, mx.truncate_rank(b - a, rank=2), alpha=0.5),
}
SHAPES = {
    "vector": (70,),
    "number": (),
    "matrix": (12, 9),
    "text_projection": (9, 9),
    "kernel": (6, 4, 3, 3),
    "stack.0": (8,),
}


def models_of_shapes(shapes, count=3):
    random = torch.Generator().manual_seed(0)
    return [
        {key: torch.randn(shape, generator=random) for key, shape in shapes.items()} for _ in range(count)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_keys_without_factors_are_merged_tile_by_tile_to_the_same_bytes(name, monkeypatch):
    models = models_of_shapes(SHAPES)
    made = mx.merge(CALLS[name](*map(mx.model, models)))
    monkeypatch.setattr("mecha_exp.engine.planner.key_plans.without_factors", lambda roots, *_: roots)
    whole = mx.merge(CALLS[name](*map(mx.model, models)))

    assert made.keys() == whole.keys() == SHAPES.keys()
    assert all(torch.equal(made[key], whole[key]) for key in SHAPES)


@pytest.mark.parametrize("name", CALLS)
def test_keys_without_factors_need_no_whole_tensors(name):
    recipe = CALLS[name](*map(mx.model, models_of_shapes({"vector": (70,), "number": ()})))

    with plan([mx.Job(recipe, {})], mx.EngineOptions()) as planned:
        assert [planned.whole_bytes_of(key) for key in planned.keys] == [0, 0]


def test_only_methods_of_whole_tensors_do_without_factors():
    with pytest.raises(
        mx.RecipeError, match="`without=` is for methods of whole tensors, not for one that is"
    ):
        merge_method(elementwise=True, register=False, without=lambda a: a)(lambda a: a)


def test_a_factor_is_no_model_and_no_tile(decomposed):
    _, svd, _ = decomposed
    node = mx.model({"w": torch.ones(3, 3)})

    with pytest.raises(mx.RecipeError, match=r"decomposition\(a\) gives a factor for a key, not a tensor"):
        mx.merge(svd(node))
    with pytest.raises(mx.MergeError, match=r"works on tiles, but is given the factor decomposition\(a\)"):
        mx.merge(mx.weighted_sum(node, node, alpha=svd(node)))


def test_a_parameter_has_choices_and_a_meaning():
    def chosen(
        a: Parameter(Tensor),
        how: Parameter(str, choices=(True, False, "l1"), help="what is kept equal") = True,
    ) -> Return(Tensor):
        return a

    method = merge_method(elementwise=True, register=False)(chosen)

    assert method.signature["how"].help == "what is kept equal"
    assert method("a", how="l1") and method("a", how=False)
    for wrong in ("l2", 1, 0.5):
        with pytest.raises(mx.RecipeError, match="how: expected true or false or l1, got"):
            method("a", how=wrong)

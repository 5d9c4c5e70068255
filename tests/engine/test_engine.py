"""What the engine makes: the right bytes, the same bytes however it is run, and a true account of them."""

import math
import os
import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from state_dicts import StateDict, contents, floating, random_model
from torch import Tensor

import mecha_exp
from mecha_exp import (
    EngineOptions,
    Job,
    Node,
    Parameter,
    Return,
    Tile,
    deserialize,
    merge,
    merge_many,
    merge_method,
    model,
    plan,
    reduction,
)
from mecha_exp.checkpoint import positional, torch_dtype
from mecha_exp.engine.ir.reductions import REDUCTION_BLOCK
from mecha_exp.engine.statistics import summarise
from mecha_exp.graph.literals import as_node
from mecha_exp.methods.reductions import kth_magnitude

Model = str | Node
BLOCKS = 4
LARGE = {
    "large": ((BLOCKS * REDUCTION_BLOCK // 1000, 1000), torch.float32),
    "odd": ((3, REDUCTION_BLOCK + 77), torch.bfloat16),
}
"""Tensors of several blocks of a reduction, whose sizes are no multiples of anything."""


@merge_method(register=False)
def reverse(a: Parameter(Tensor)) -> Return(Tensor):
    """A function of the whole tensor."""
    return a.flip(tuple(range(a.ndim)))


@merge_method(rowwise=True, register=False)
def softmax_rows(a: Parameter(Tensor), sharpness: Parameter(Tensor) = 1.0) -> Return(Tensor):
    """A function of each row."""
    return torch.softmax(a * sharpness, dim=-1)


@merge_method(elementwise=True, register=False)
def fill(a: Parameter(Tensor), value: Parameter(Tensor, "param")) -> Return(Tensor):
    """Makes a small value visible: it takes the place of every entry."""
    return torch.zeros_like(a) + value


@reduction(register=False, rounds=lambda dtype: 2, finish=lambda total, state, count, dtype: total / count)
def variance(a: Parameter(Tensor), *, state: Tensor | None = None) -> Return(Tensor, "param"):
    """The mean in the first round, then the mean of the squared distance to it."""
    return (a.double() if state is None else (a.double() - state).square()).sum()


def recipes(a: Model, b: Model, c: Model) -> dict[str, Node]:
    """A recipe of every kind of program: tiles alone, reductions, rows, whole tensors, and mixtures."""
    m = mecha_exp
    ties = m.add_difference_ties(a, b, c, alpha=0.7, k=0.2)
    return {
        "weighted_sum": m.weighted_sum(a, b, alpha=0.3),
        "n_average": m.n_average(a, b, c),
        "add_difference": m.add_difference(a, b, c, alpha=0.3),
        "task_arithmetic": m.task_arithmetic(a, b, c, weights=[0.3, -0.7], scale=1.1),
        "slerp": m.slerp(a, b, alpha=0.4),
        "ties": ties,
        "dare_linear": m.dare_linear(a, b, c, density=0.3, seed=4),
        "dare_ties": m.dare_ties(a, b, c, weights=[0.5, 1], density=0.6),
        "model_stock": m.n_model_stock(a, b, c),
        "reductions of reductions": m.slerp(ties, m.slerp(b, c), alpha=0.2),
        "rows of tiles of rows": softmax_rows(m.weighted_sum(m.n_model_stock(a, b, c), b), sharpness=2),
        "reductions of rows": m.slerp(m.n_model_stock(a, b, c), softmax_rows(a)),
        "rows of other lengths": m.della(a, m.add_cosine_b(b, c, alpha=0.3), c, density=0.6, seed=4),
        "reductions of columns": m.nuslerp(softmax_rows(a), b, weight_b=2.0, flatten=False, row_wise=True),
        "whole": m.weighted_sum(reverse(m.slerp(a, reverse(b))), c, alpha=0.1),
        "per key": m.slerp(a, b, alpha={"conv": 0, "proj.weight": 1, "default": 0.1}),
        "one model": as_node(b),
    }


RECIPES = sorted(recipes("a", "b", "c"))


def made(recipe: Node, dtype: torch.dtype | None = None, **options) -> StateDict:
    return merge(recipe, options=EngineOptions(**options), dtype=dtype)


@pytest.mark.parametrize("name", RECIPES)
def test_the_bytes_do_not_depend_on_workers_and_tiles(name, models, tmp_path):
    recipe = recipes(*models(3, **LARGE))[name]

    positional = []
    for workers, tile_size in [(1, 1 << 18), (2, 4096), (4, 1001), (4, 1 << 16)]:
        path = tmp_path / f"{workers}-{tile_size}.safetensors"
        job = Job(recipe, path, durable=False)
        merge_many([job], EngineOptions(workers=workers, tile_size=tile_size))
        positional.append(path.read_bytes())

    assert positional[1:] == positional[:1] * 3


@pytest.mark.parametrize("name", ["ties", "whole"])
def test_a_platform_without_positional_calls_gives_the_same_bytes(name, models, tmp_path, monkeypatch):
    recipe = recipes(*models(3, **LARGE))[name]

    merge(recipe, tmp_path / "here.safetensors", EngineOptions(workers=4, tile_size=4096))
    for call in ("pread", "preadv", "pwrite", "pwritev", "posix_fallocate", "posix_fadvise", "fdatasync"):
        monkeypatch.delattr(os, call, raising=False)
    monkeypatch.setattr(positional, "POSITIONAL", False)
    merge(recipe, tmp_path / "there.safetensors", EngineOptions(workers=4, tile_size=4096))

    assert (tmp_path / "there.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()


def test_a_batch_gives_what_each_gives_alone(models):
    paths = models(3, **LARGE)
    points = [
        mecha_exp.add_difference_ties(*paths, alpha=alpha, k=k) for alpha, k in product((0.3, 1), (0.1, 0.6))
    ]
    points += [*(mecha_exp.slerp(*paths[:2], alpha=alpha) for alpha in (0.2, 1)), reverse(points[0])]
    points += [mecha_exp.weighted_sum(points[1], softmax_rows(paths[0]), alpha={"l*": 0.1, "default": 0.5})]
    targets: list[StateDict] = [{} for _ in points]

    merge_many([Job(point, target) for point, target in zip(points, targets, strict=True)])

    assert len(points) == 8
    for point, target in zip(points, targets, strict=True):
        assert contents(target) == contents(made(point))


def test_a_batch_reads_what_its_points_share_once(models):
    paths = models(2)
    points = [mecha_exp.weighted_sum(*paths, alpha=alpha / 10) for alpha in range(1, 9)]

    report = merge_many([Job(point, {}) for point in points])

    assert report.bytes_read == merge_many([Job(points[0], {})]).bytes_read


@pytest.mark.parametrize("tile_size", [1000, 4096, 1 << 18])
def test_an_elementwise_method_gives_the_bits_of_the_formula_on_whole_tensors(models, tile_size):
    @merge_method(elementwise=True, register=False)
    def formula(a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(Tensor) = 0.5) -> Return(Tensor):
        return torch.where(a.abs() > alpha, torch.lerp(a, b, alpha).tanh() * b.exp(), (a - b) / 3)

    paths = models(2, **LARGE)
    a, b = (floating(load_file(path)) for path in paths)

    merged = made(formula(*paths, alpha=0.3), tile_size=tile_size)

    for key in a:
        wide = torch.float64 if a[key].dtype is torch.float64 else torch.float32
        whole = formula.__wrapped__(a[key].to(wide), b[key].to(wide), torch.tensor(0.3, dtype=wide))
        assert torch.equal(merged[key], whole.to(a[key].dtype)), key


def test_float64_is_computed_in_float64(models):
    paths = models(2)
    a, b = (floating(load_file(path)) for path in paths)

    merged = made(mecha_exp.n_average(*paths), compute_dtype=torch.float64)

    for key in a:
        assert torch.equal(merged[key], ((a[key].double() + b[key].double()) / 2).to(a[key].dtype)), key


def test_a_method_of_whole_tensors_sees_them_in_their_shape(models):
    shapes = {}

    @merge_method(register=False)
    def spectrum(a: Parameter(Tensor), b: Parameter(Tensor), power: Parameter(float)) -> Return(Tensor):
        shapes[tuple(a.shape)] = a.dtype
        if a.ndim != 2:
            return a + power * b
        u, s, v = torch.linalg.svd(a, full_matrices=False)
        return u @ torch.diag(s**power) @ v + b

    paths = models(2)
    a, b = (floating(load_file(path)) for path in paths)
    merged = made(mecha_exp.weighted_sum(spectrum(*paths, power=0.5), paths[0], alpha=0.25))

    expected_shapes = {tuple(tensor.shape) for tensor in a.values() if tensor.numel()}
    assert shapes.keys() == expected_shapes
    assert set(shapes.values()) == {torch.float32, torch.float64}, "float64 tensors are computed as such"
    for key in a:
        if a[key].numel():
            wide = torch.float64 if a[key].dtype is torch.float64 else torch.float32
            whole = spectrum.__wrapped__(a[key].to(wide), b[key].to(wide), 0.5)
            expected = torch.lerp(whole, a[key].to(wide), 0.25).to(a[key].dtype)
            torch.testing.assert_close(merged[key], expected)


def test_a_method_of_rows_sees_rows(models):
    paths = models(1, **LARGE)
    a = floating(load_file(paths[0]))

    merged = made(softmax_rows(paths[0], sharpness=3), tile_size=2500)

    for key in a:
        expected = a[key].float().mul(3).softmax(-1) if a[key].ndim else torch.ones(())
        torch.testing.assert_close(merged[key], expected.to(a[key].dtype))


def test_a_method_may_know_where_its_tile_lies(models):
    @merge_method(elementwise=True, register=False)
    def position(a: Parameter(Tensor), tile: Tile) -> Return(Tensor):
        assert tile.stop - tile.start == a.numel()
        return torch.arange(tile.start, tile.stop) + 1000.0 * (tile.key == "column")

    merged = made(position(*models(1, **LARGE)), tile_size=4096, dtype=torch.float32)

    assert torch.equal(merged["large"].view(-1), torch.arange(merged["large"].numel(), dtype=torch.float32))
    assert merged["column"].view(-1).tolist() == [1000.0 + i for i in range(7)]


def test_small_values_are_computed_in_float64(models):
    seen = []

    @merge_method(elementwise=True, register=False)
    def note(value: Parameter(Tensor, "param"), factor: Parameter(Tensor) = 2.0) -> Return(Tensor, "param"):
        seen.append((value.dtype, factor.dtype, value.shape))
        return value * factor

    (path,) = models(1)
    made(fill(path, note(variance(path))))

    assert set(seen) == {(torch.float64, torch.float64, torch.Size([]))}


def test_a_reduction_in_rounds_gets_its_state_back(save):
    tensor = torch.randn(3 * REDUCTION_BLOCK + 5, generator=torch.Generator().manual_seed(0)) + 10

    merged = made(fill(path := save("m", {"w": tensor}), variance(path)))

    assert merged["w"][0] == pytest.approx(tensor.double().var(correction=0).item(), rel=1e-6)


def test_partial_results_are_added_in_the_order_of_the_blocks(save):
    parts = [1e16, -1e16, 1.0, 2.0, 3.0]  # whose sum depends on the order
    tensor = torch.cat([torch.full((REDUCTION_BLOCK,), part, dtype=torch.float64) for part in parts])
    last_is_done, waits = threading.Event(), []

    @reduction(register=False)
    def first_entries(a: Parameter(Tensor)) -> Return(Tensor, "param"):
        if waits and a[0] == parts[0]:
            assert last_is_done.wait(timeout=30)
        if a[0] == parts[-1]:
            last_is_done.set()
        return a[0].clone()

    recipe = fill(path := save("m", {"w": tensor}), first_entries(path))
    options = {"tile_size": REDUCTION_BLOCK, "compute_dtype": torch.float64}
    in_order = made(recipe, workers=1, **options)
    last_is_done.clear()
    waits.append(True)
    out_of_order = made(recipe, workers=2, **options)

    assert contents(in_order) == contents(out_of_order)


@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, 0.1, -0.1, 3e38]) | st.floats(width=32), min_size=1
    ),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_kth_magnitude_is_the_order_statistic_of_the_magnitudes(values, k, dtype):
    tensor = torch.tensor(values, dtype=torch.float32).nan_to_num()

    merged = made(fill(node := model({"w": tensor}), kth_magnitude(node, k=k)), compute_dtype=dtype)

    rank = max(int((1 - k) * len(values)), 1)
    assert merged["w"][0] == tensor.abs().kthvalue(rank).values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [0.0, 0.01, 0.2, 0.5, 0.999, 1.0])
def test_kth_magnitude_of_a_tensor_of_many_blocks(save, k, dtype):
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(BLOCKS * REDUCTION_BLOCK + 123, generator=generator, dtype=dtype)
    tensor[::3] = 0.25  # ties

    merged = made(fill(path := save("m", {"w": tensor}), kth_magnitude(path, k=k)), compute_dtype=dtype)

    rank = max(int((1 - k) * tensor.numel()), 1)
    assert merged["w"][0] == tensor.abs().kthvalue(rank).values


def test_each_key_gets_its_own_value(models):
    paths = models(2)
    recipe = mecha_exp.weighted_sum(
        *paths, alpha={"conv": 0.0, "*.scale": 1, "proj.weight": 0.25, "default": 0.5}
    )

    merged = made(recipe)

    a, b = (load_file(path) for path in paths)
    assert torch.equal(merged["conv.weight"], a["conv.weight"])
    assert torch.equal(merged["norm.scale"], b["norm.scale"])
    assert torch.equal(
        merged["proj.weight"], a["proj.weight"].float().lerp(b["proj.weight"].float(), 0.25).half()
    )
    assert torch.equal(merged["column"], a["column"].lerp(b["column"], 0.5))


def test_a_value_may_be_a_tensor_of_the_shape_of_the_key(save):
    a, b, alpha = (torch.rand(64, 32) for _ in range(3))
    paths = save("a", {"w": a}), save("b", {"w": b})

    merged = made(mecha_exp.weighted_sum(*paths, alpha=alpha), tile_size=100)
    whole = made(reverse(mecha_exp.weighted_sum(*paths, alpha=alpha)))
    single = made(mecha_exp.weighted_sum(*paths, alpha=torch.tensor([[0.25]])))

    expected = torch.where(alpha < 0.5, a + alpha * (b - a), b - (1 - alpha) * (b - a))
    assert torch.equal(merged["w"], expected)
    assert torch.equal(whole["w"], expected.flip(0, 1))
    assert torch.equal(single["w"], a.lerp(b, 0.25))


def test_the_output_keeps_the_dtype_of_the_first_input_or_has_the_wanted_one(models, save):
    first, second = models(2)
    wide = save("wide", {k: t.double() if t.is_floating_point() else t for k, t in load_file(second).items()})
    recipe = mecha_exp.weighted_sum(first, wide)

    kept, wanted = made(recipe), made(recipe, dtype=torch.float16)

    assert {key: t.dtype for key, t in kept.items()} == {key: t.dtype for key, t in load_file(first).items()}
    assert {t.dtype for t in floating(wanted).values()} == {torch.float16}
    assert wanted["step"].dtype == torch.int64
    assert all(torch.equal(wanted[k], made(recipe, dtype=torch.float32)[k].half()) for k in floating(wanted))


@pytest.mark.parametrize("name", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_every_floating_point_dtype_is_read_and_written(name, tmp_path):
    dtype = torch_dtype(name)
    a, b = (torch.linspace(0.5, stop, 33).to(dtype) for stop in (2, 8))
    recipe = mecha_exp.n_average({"w": a}, {"w": b})

    merge_many([Job(recipe, tmp_path / "out.safetensors", durable=False), Job(recipe, target := {})])

    expected = ((a.float() + b.float()) / 2).to(dtype)
    assert contents(load_file(tmp_path / "out.safetensors")) == contents(target) == contents({"w": expected})


def test_whole_numbers_are_taken_from_the_first_input(save):
    a = save(
        "a",
        random_model(0) | {"mask": torch.tensor([True, False]), "same": torch.tensor([7], dtype=torch.uint8)},
    )
    b = save(
        "b",
        random_model(1) | {"mask": torch.tensor([True, True]), "same": torch.tensor([7], dtype=torch.uint8)},
    )
    target: StateDict = {}

    options = EngineOptions(on_integers="base")
    report = merge_many([Job(mecha_exp.n_average(a, b), target)], options)

    assert target["step"].tolist() == [3, 4]
    assert target["mask"].tolist() == [True, False]
    (warning,) = report.warnings
    assert warning.startswith(
        "1 key is not floating point and differs between the inputs; the first one's values are"
    )
    assert warning.endswith(": mask")


@pytest.mark.parametrize("name", RECIPES)
def test_empty_and_zero_dimensional_tensors_are_tensors(name, models, tmp_path):
    merged = load_file(merge(recipes(*models(3))[name], tmp_path / "out.safetensors"))

    assert merged["empty"].shape == (0, 3)
    assert merged["scalar"].shape == ()
    assert merged["scalar"].isfinite()


def test_tensors_in_memory_are_models_too():
    a, b = random_model(0), random_model(1)
    a["view"], b["view"] = torch.randn(6, 4).t()[1:, ::2], torch.randn(3, 3)
    before = contents(a), contents(b)

    merged = made(mecha_exp.add_difference_ties(model(a), model(b), k=0.5))

    assert (contents(a), contents(b)) == before
    assert list(merged) == list(a)
    assert torch.equal(made(mecha_exp.weighted_sum(model(a), b, alpha=0))["view"], a["view"])


@pytest.mark.parametrize("name", RECIPES)
def test_no_input_is_written_to(name):
    state_dicts = [random_model(seed) for seed in range(3)]
    before = [contents(state_dict) for state_dict in state_dicts]

    made(recipes(*map(model, state_dicts))[name])

    assert [contents(state_dict) for state_dict in state_dicts] == before


def test_a_file_says_what_it_was_made_of(models, tmp_path):
    recipe = mecha_exp.slerp(*models(2))

    path = merge(recipe, tmp_path / "new" / "out.safetensors")

    assert isinstance(path, Path)
    with safe_open(path, framework="pt") as file:
        assert deserialize(file.metadata()["mecha_recipe"]) is recipe
        assert file.metadata()["format"] == "pt"
    assert contents(load_file(path)) == contents(made(recipe))
    assert contents(made(model(str(path)))) == contents(load_file(path))


def test_relative_paths_are_looked_for_in_the_model_folders(models, tmp_path, monkeypatch):
    models(2)
    monkeypatch.chdir("/")

    merged = made(mecha_exp.n_average("model_0.safetensors", "model_1.safetensors"), model_dirs=[tmp_path])

    assert "conv.weight" in merged


def test_models_are_looked_for_in_the_folders_of_the_environment_too(models, tmp_path, monkeypatch):
    models(2)
    monkeypatch.setenv("MECHA_MODELS_DIR", os.pathsep.join([str(tmp_path / "nowhere"), str(tmp_path)]))

    assert made(mecha_exp.n_average("model_0", "model_1.safetensors")), "and .safetensors may be left out"


def test_a_chain_of_many_merges_is_run(save):
    base, other = save("a", {"w": torch.zeros(3)}), save("b", {"w": torch.ones(3)})
    node = model(base)
    for i in range(1_000):
        node = mecha_exp.weighted_sum(node, other, alpha=1 / (i + 2))

    assert made(node)["w"][0] == pytest.approx(1 - 1 / 1001, rel=1e-4)


def test_a_subgraph_that_is_used_often_is_computed_once(save):
    calls = []

    @merge_method(elementwise=True, register=False)
    def count(a: Parameter(Tensor)) -> Return(Tensor):
        calls.append(len(a))
        return a + 1

    node = count(save("a", {"w": torch.zeros(3)}))
    for _ in range(40):
        node = mecha_exp.n_average(node, node)

    assert made(node)["w"].tolist() == [1, 1, 1]
    assert calls.count(3) == 1  # it is tried on other numbers before


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_statistics_are_those_of_what_is_stored(models, dtype):
    paths = models(2, **LARGE)
    recipe = mecha_exp.weighted_sum(*paths, alpha=0.3)
    target: StateDict = {}

    report = merge_many(
        [Job(recipe, target, dtype, statistics=True), Job(recipe, None, dtype, statistics=True)]
    )

    for moments in report.moments:
        assert set(moments) == {model(path) for path in paths}
        for path in paths:
            merged, original = floating(target), floating(load_file(path))
            x, y = (
                np.concatenate([t.double().numpy().ravel() for t in d.values()]) for d in (merged, original)
            )
            y = np.concatenate([original[key].double().numpy().ravel() for key in merged])
            whole = summarise(moments[model(path)])[""]
            assert whole.norm == pytest.approx(np.linalg.norm(x), rel=1e-6)
            assert whole.input_norm == pytest.approx(np.linalg.norm(y), rel=1e-6)
            assert whole.distance == pytest.approx(np.linalg.norm(x - y), rel=1e-6)
            assert whole.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-6)
            assert whole.relative_change == pytest.approx(whole.distance / whole.input_norm)
            by_layer = summarise(moments[model(path)], lambda key: key.partition(".")[0])
            assert set(by_layer) >= {"conv", "large", "scalar"}


def test_the_distance_to_an_input_that_comes_out_again_is_zero(models):
    paths = models(3, **LARGE)
    first, second = mecha_exp.weighted_sum(*paths[:2], alpha=0), mecha_exp.weighted_sum(*paths[:2], alpha=1)

    report = merge_many([Job(recipe, statistics=True) for recipe in (first, second)])

    for number, moments in enumerate(report.moments):
        found = [summarise(moments[model(path)])[""] for path in paths[:2]]
        assert [statistics.distance == 0 for statistics in found] == [number == 0, number == 1]
        assert found[number].cosine == pytest.approx(1, abs=1e-12)


def test_small_distances_are_exact(save):
    base = torch.linspace(1, 2, 100_000)
    moved = base.clone()
    moved[77] += 2**-20
    paths = [save("base", {"w": base}), save("far", {"w": -base}), save("moved", {"w": moved})]

    recipe = mecha_exp.weighted_sum(mecha_exp.n_average(*paths[:2]), paths[2], alpha=1)
    report = merge_many([Job(recipe, statistics=True)])

    distance = summarise(report.moments[0][model(paths[0])])[""].distance
    assert distance == 2**-20


def test_statistics_of_zero_tensors_are_nan_where_they_have_no_meaning(save):
    zero = save("zero", {"w": torch.zeros(3)})

    report = merge_many([Job(mecha_exp.n_average(zero, zero), statistics=True)])

    whole = summarise(report.moments[0][model(zero)])[""]
    assert (whole.norm, whole.distance) == (0, 0)
    assert math.isnan(whole.cosine)
    assert math.isnan(whole.relative_change)


@pytest.mark.parametrize("name", RECIPES)
def test_progress_hears_of_every_byte(name, models):
    heard: list[int] = []
    recipe = recipes(*models(3, **LARGE))[name]

    report = merge_many([Job(recipe, {})], progress=lambda key, nbytes: heard.append(nbytes))

    assert sum(heard) == report.bytes_read > 0


def test_the_report_counts_bytes(models, tmp_path):
    paths = models(2)
    recipe = mecha_exp.weighted_sum(*paths)

    report = merge_many([Job(recipe, tmp_path / "out.safetensors")])

    nbytes = sum(tensor.nbytes for tensor in load_file(paths[0]).values())
    assert report.bytes_written == nbytes
    assert report.bytes_read == 2 * nbytes
    assert report.bytes_per_second > 0
    assert report.warnings == ()
    assert report.nonfinite_values == (0,)


def test_a_plan_tells_what_will_be_done(models):
    paths = models(2, **LARGE)

    with plan([Job(mecha_exp.slerp(*paths), {})], EngineOptions(workers=1)) as planned:
        assert {key.key for key in planned.keys} == set(load_file(paths[0]))
        assert planned.bytes_read > planned.bytes_written > 0
        assert planned.memory > 0
        assert planned.whole_bytes == 0


def test_a_difference_is_not_compared_with_the_models_it_comes_from(models):
    a, b = models(2)

    report = merge_many([Job(mecha_exp.subtract(a, b), {}, statistics=True)])

    assert report.moments == ({},)

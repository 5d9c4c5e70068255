"""Fused loops give the bits of eager torch, and where there can be none, torch runs and the plan says why."""

import gc
import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import mecha_exp as mx
from mecha_exp import Parameter, Return, merge_method
from mecha_exp.engine.compiler import jit, object_file
from mecha_exp.engine.compiler.ops import OPERATIONS, Operation

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -1.5, 3.0, 1e-40, -1e-45, 1.17549435e-38, 3.4e38, -3.4e38, 1e-7, 255.0]
NOT_FINITE = [float("inf"), float("-inf"), float("nan")]

I32, F32 = torch.int32, torch.float32
INSTANCES = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: 1 - a,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
    "sign": lambda a, b: a.sign(),
    "square": lambda a, b: a.square(),
    "reciprocal": lambda a, b: a.reciprocal(),
    "clamp": lambda a, b: a.clamp(-0.7, 0),
    "clamp_min": lambda a, b: a.clamp_min(0),
    "clamp_max": lambda a, b: a.clamp(max=0.25),
    "where": lambda a, b: torch.where(a > b, b, a),
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "isnan": lambda a, b: a.isnan(),
    "logical_and": lambda a, b: torch.logical_and(a, b),
    "logical_or": lambda a, b: torch.logical_or(a, b > 0),
    "logical_not": lambda a, b: torch.logical_not(a),
    "logical_xor": lambda a, b: torch.logical_xor(a, b),
    "bitwise_and": lambda a, b: (a.view(I32) & b.view(I32)).view(F32),
    "bitwise_or": lambda a, b: ((a > b) | (a == 0)) & (b > 0),
    "bitwise_xor": lambda a, b: (a.view(I32) ^ 0x5A5A5A5A).view(F32),
    "bitwise_not": lambda a, b: (~a.view(I32)).view(F32) * (~(a > b)),
    "__rshift__": lambda a, b: (a.view(I32) >> 7).view(F32),
    "__lshift__": lambda a, b: (a.view(I32) << 3).view(F32),
    "bitwise_right_shift": lambda a, b: torch.bitwise_right_shift(a.view(I32), b.view(I32) & 63).view(F32),
    "bitwise_left_shift": lambda a, b: torch.bitwise_left_shift(a.view(I32), b.view(I32) & 31).view(F32),
    "bits": lambda a, b: a.view(I32),
    "number": lambda a, b: (a.view(I32) + 1).view(F32),
    "zeros_like": lambda a, b: torch.zeros_like(a) - b,
    "ones_like": lambda a, b: torch.ones_like(a) * b,
    "cast": lambda a, b: (a.double() * 1.1 + b.double()).float(),
    # the same with scalars, other dtypes, and several at once
    "add: scalar": lambda a, b: a + 0.1,
    "add: whole": lambda a, b: 0 + a,
    "mul: scalar": lambda a, b: a * 0.3,
    "mul: truth": lambda a, b: a * (b > 0),
    "mul: whole numbers": lambda a, b: (a.view(I32) * 31).view(F32),
    "div: scalar": lambda a, b: a / 3,
    "div: whole numbers": lambda a, b: a.view(I32) / 7,
    "rsub: scalar": lambda a, b: 0.7 - a,
    "lt: scalar": lambda a, b: a < 0.1,
    "ge: whole number": lambda a, b: a.view(I32) >= b,
    "eq: whole numbers": lambda a, b: a.view(I32) == (b.view(I32) & 255),
    "where: scalar": lambda a, b: torch.where(a.abs() >= 0.5, a, 0),
    "sign: whole number": lambda a, b: a.view(I32).sign(),
    "abs: double": lambda a, b: a.double().abs(),
    "no contraction": lambda a, b: a * b + a,
    "cast: half": lambda a, b: a.to(torch.float16).to(F32),
    "cast: bfloat16": lambda a, b: (a * b).to(torch.bfloat16).to(F32),
    "cast: e4m3fn": lambda a, b: a.to(torch.float8_e4m3fn).to(F32),
    "cast: e4m3fnuz": lambda a, b: a.to(torch.float8_e4m3fnuz).to(F32),
    "cast: e5m2": lambda a, b: b.to(torch.float8_e5m2).to(F32),
    "cast: e5m2fnuz": lambda a, b: (a * b).to(torch.float8_e5m2fnuz).to(F32),
    "cast: truth": lambda a, b: (a > b).to(F32) + (b > 0).double() + a.bool(),
    "cast: whole number": lambda a, b: a.view(I32).to(F32),
}


def one_tensor(values, dtype=F32):
    return mx.model({"w": torch.as_tensor(values, dtype=dtype)})


def run(recipes, **options):
    """The merged tensors under `w`, one for each recipe, from a single pass."""
    jobs = [mx.Job(recipe, {}) for recipe in recipes]
    mx.merge_many(jobs, mx.EngineOptions(on_nonfinite="keep", **options))
    return [job.output["w"] for job in jobs]


def same_bits(a, b):
    return bool(((a.view(I32) == b.view(I32)) | (a.isnan() & b.isnan())).all())


def every_pair(values, count):
    pairs = list(itertools.product(values, values))
    drawn = torch.randn(2, count, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([1e-42, 1e-20, 1e-3, 1.0, 1e3, 60000.0, 1e30])
    drawn *= scales[torch.arange(count) % len(scales)]
    return [torch.cat([torch.tensor([p[i] for p in pairs]), drawn[i]]) for i in (0, 1)]


# every operation of the table


def instance(name):
    def function(x: Parameter(Tensor), y: Parameter(Tensor)) -> Return(Tensor):
        return INSTANCES[name](x, y)

    function.__qualname__ = f"operation {name}"
    return merge_method(elementwise=True, register=False, identifier=name)(function)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_tried(name, monkeypatch):
    monkeypatch.delitem(OPERATIONS, name)
    recipe = instance(name)(one_tensor(SPECIAL), one_tensor(SPECIAL))

    with mx.plan([mx.Job(recipe, {})], mx.EngineOptions(fuse="always")) as plan:
        assert set(plan.fused) == {f"eager: {name}: '{name}' is not in the table of operations"}


def test_one_line_of_the_table_adds_an_operation(monkeypatch):
    line = Operation("{1} if {0} == {t}(0) else {t}({0} > {t}(0))")
    monkeypatch.setitem(OPERATIONS, "heaviside", line)
    monkeypatch.setitem(INSTANCES, "heaviside", torch.heaviside)
    models = [one_tensor(values) for values in every_pair(SPECIAL + NOT_FINITE, 1001)]
    recipe = instance("heaviside")(*models)

    with mx.plan([mx.Job(recipe, {})], mx.EngineOptions(fuse="always")) as plan:
        assert set(plan.fused) == {"fused"}
    fused, eager = (run([recipe], fuse=fuse)[0] for fuse in ("always", "never"))
    assert same_bits(fused, eager)


@pytest.mark.parametrize("values", [SPECIAL, SPECIAL + NOT_FINITE], ids=["finite", "not finite"])
def test_operations_give_the_bits_of_torch(values):
    a, b = every_pair(values, 4001)

    models = one_tensor(a), one_tensor(b)
    recipes = [instance(name)(*models) for name in INSTANCES]
    with mx.plan([mx.Job(r, {}) for r in recipes], mx.EngineOptions(fuse="always")) as plan:
        assert plan.fused == {"fused": a.numel()}
    fused = run(recipes, fuse="always", workers=1)
    for tile_size in (1 << 18, 1, 21):  # torch treats the last elements of a tile in another way
        cut = slice(None) if tile_size > 1 else slice(0, 400)
        inputs = one_tensor(a[cut]), one_tensor(b[cut])
        eager = run([instance(n)(*inputs) for n in INSTANCES], fuse="never", tile_size=tile_size, workers=1)
        wrong = [n for n, f, e in zip(INSTANCES, fused, eager, strict=True) if not same_bits(f[cut], e)]
        assert wrong == []


# every recipe

SHAPES = {"a.weight": (300, 401), "a.bias": (7,), "scalar": (), "large": (70001,), "wide": (129, 1025)}


def models(count, dtype=torch.float16):
    def tensor(number, shape):
        return (torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.1).to(dtype)

    return [
        mx.model({key: tensor(10 * m + i, shape) for i, (key, shape) in enumerate(SHAPES.items())})
        for m in range(count)
    ]


M = models(4)
BRAIN = models(3, torch.bfloat16)
RECIPES = {
    "weighted_sum": [mx.weighted_sum(M[0], M[1], alpha=0.3), mx.weighted_sum(M[0], M[1], alpha=0.7)],
    "bfloat16": [mx.add_difference(*BRAIN, alpha=0.7)],
    "add_difference": [mx.add_difference(*M[:3], alpha=0.5)],
    "slerp": [mx.slerp(M[0], M[1], alpha=0.3)],
    "n_average": [mx.n_average(*M)],
    "task_arithmetic": [mx.task_arithmetic(*M, weights=[0.1, 0.2, 0.3], scale=0.9)],
    "ties": [mx.add_difference_ties(*M, k=0.2, alpha=a) for a in (0.3, 1.0)],
    "ties by value": [mx.add_difference_ties(*M, k=0.6, vote_sgn=True)],
    "dare_linear": [mx.dare_linear(*M, density=0.3, seed=3)],
    "dare_ties": [mx.dare_ties(*M, density=0.3, rescale=False)],
    "model_stock": [mx.n_model_stock(*M)],
    "norm": [mx.scale(mx.subtract(M[0], M[1]) * 0.3, alpha=0.1) + mx.subtract(M[2], M[1])],
}


def digest(recipes, statistics, **options):
    """A hash of the outputs of a sweep and of the sums behind its statistics."""
    jobs = [mx.Job(recipe, {}, statistics=statistics) for recipe in recipes]
    report = mx.merge_many(jobs, mx.EngineOptions(**options))
    tensors = [job.output[key] for job in jobs for key in SHAPES]
    tensors += [sums[key] for by_model in report.moments for sums in by_model.values() for key in SHAPES]
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_give_the_bytes_of_torch(name):
    statistics = name != "norm"
    expected = digest(RECIPES[name], statistics, fuse="never", workers=1)
    for options in (
        {"fuse": "always", "workers": 1},
        {"fuse": "always", "workers": 4, "tile_size": 4096},
        {"fuse": "always", "workers": 2, "tile_size": 1001},
        {"fuse": "never", "workers": 2, "tile_size": 5003},
    ):
        assert digest(RECIPES[name], statistics, **options) == expected, options


@pytest.mark.parametrize("name", ["ties", "slerp", "dare_linear"])
def test_double_precision_is_fused_too(name):
    options = {"compute_dtype": torch.float64, "statistics": False}
    expected = digest(RECIPES[name], fuse="never", **options)
    assert digest(RECIPES[name], fuse="always", **options) == expected


def test_a_sweep_over_fractions_compiles_once():
    def sources(alpha):
        job = mx.Job(mx.add_difference_ties(*M, k=0.2, alpha=alpha), {})
        with mx.plan([job], mx.EngineOptions(fuse="always")) as plan:
            return {way.structure for way in plan.backends.values()}

    assert sources(0.3) == sources(0.7) == sources(1.0)


@pytest.mark.parametrize("output", [None, {}], ids=["measured", "made"])
def test_sweeps_of_different_length_share_their_loops(output):
    def sources(points):
        jobs = [
            mx.Job(
                mx.add_difference_ties(*M, k=0.2, alpha=point / 100),
                None if output is None else {},
                statistics=True,
            )
            for point in range(points)
        ]
        with mx.plan(jobs, mx.EngineOptions(fuse="always")) as plan:
            return {way.structure for way in plan.backends.values()}

    assert sources(9) == sources(20) == sources(50)


def test_a_long_sweep_over_two_hyperparameters_gives_the_bytes_of_torch():
    sweep = [mx.add_difference_ties(*M, k=k, alpha=a) for k in (0.2, 0.5) for a in (0.1, 0.3, 0.5, 1.0)]
    sweep += [mx.weighted_sum(M[0], M[1], alpha=0.3), mx.n_average(*M)]
    expected = digest(sweep, True, fuse="never", workers=1)

    assert digest(sweep, True, fuse="always", workers=2, tile_size=70_000) == expected


def test_what_many_models_are_summed_with_gives_the_bytes_of_torch():
    many = models(16)
    sweep = [mx.task_arithmetic(*many, weights=0.1, scale=scale) for scale in (0.3, 0.7)]
    expected = digest(sweep, True, fuse="never", workers=1)

    assert digest(sweep, True, fuse="always", workers=2) == expected


def test_a_value_that_is_not_finite_is_found_by_the_loop():
    broken = torch.zeros(100_000)
    broken[99_999] = float("nan")
    recipe = mx.weighted_sum(one_tensor(torch.zeros(100_000)), one_tensor(broken), alpha=0.3)
    with pytest.raises(mx.MergeError, match="the key 'w' has values that are not finite"):
        mx.merge_many([mx.Job(recipe, {})], mx.EngineOptions(fuse="always"))


def test_an_overflow_in_the_output_is_counted():
    recipe = mx.n_average(*[one_tensor([60000.0, 1.0, -65519.0, 65520.0]) for _ in range(2)])
    for fuse in ("always", "never"):
        jobs = [mx.Job(recipe, {}, torch.float16), mx.Job(recipe, None, torch.float16, statistics=True)]
        for tried in (jobs, jobs[:1], jobs[1:]):  # with and without somebody who is given the values
            report = mx.merge_many(tried, mx.EngineOptions(fuse=fuse))
            assert report.nonfinite_values == (1,) * len(tried)


# what is not fused


def exponential(a: Parameter(Tensor)) -> Return(Tensor):
    return a.exp()


def in_place(a: Parameter(Tensor)) -> Return(Tensor):
    return a.clone().mul_(2)


def across(a: Parameter(Tensor)) -> Return(Tensor):
    return torch.stack([a, 3 * a]).mean(0)


def through_numpy(a: Parameter(Tensor)) -> Return(Tensor):
    return torch.from_numpy(a.numpy() * 2)


def fused_multiply_add(a: Parameter(Tensor)) -> Return(Tensor):
    return torch.add(a, a, alpha=0.3)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (exponential, "exponential: 'exp' is not in the table of operations"),
        (in_place, "in_place: it writes into a tensor (mul_)"),
        (across, "across: 'stack' gives another shape"),
        (through_numpy, "through_numpy: it reads values (numpy)"),
        (fused_multiply_add, "fused_multiply_add: 'add' with alpha is not in the table of operations"),
    ],
)
def test_what_cannot_be_traced_runs_eagerly_and_the_plan_says_why(function, reason):
    method = merge_method(elementwise=True, register=False)(function)
    values = torch.linspace(-1, 1, 1001)
    recipe = method(one_tensor(values))
    with mx.plan([mx.Job(recipe, {})], mx.EngineOptions(fuse="always")) as plan:
        assert plan.fused == {f"eager: {reason}": 1001}
    assert torch.equal(run([recipe], fuse="always")[0], function(values))


def test_the_other_stages_of_such_a_merge_are_fused():
    method = merge_method(elementwise=True, register=False)(exponential)
    recipe = mx.slerp(method(M[0]), M[1], alpha=0.3)
    with mx.plan(
        [mx.Job(mx.slerp(M[0], M[1]), {}), mx.Job(recipe, {})], mx.EngineOptions(fuse="always")
    ) as p:
        assert set(p.fused) == {"eager: exponential: 'exp' is not in the table of operations"}
    whole = merge_method(register=False, identifier="flipped")(flipped)
    with mx.plan([mx.Job(whole(M[0]) * 0.5, {})], mx.EngineOptions(fuse="always")) as p:
        assert set(p.fused) == {"whole", "fused"}


def flipped(a: Parameter(Tensor, "weight")) -> Return(Tensor, "delta"):
    return a.flip(0) if a.ndim else a


def test_sums_and_ranks_of_a_user_are_fused():
    def total(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor, "param"):
        return (a * b).double(), b.double()

    def middle(a: Parameter(Tensor)) -> Return(Tensor, "param"):
        return a * 0.5

    def scaled(
        a: Parameter(Tensor), sums: Parameter(Tensor, "param"), top: Parameter(Tensor, "param")
    ) -> Return(Tensor):
        return a * (sums[0] / sums[1]) + top

    total = mx.reduction(sums=True, register=False)(total)
    middle = mx.reduction(rank=lambda count: count // 2, register=False)(middle)
    scaled = merge_method(elementwise=True, register=False)(scaled)
    recipe = scaled(M[0], total(M[0], M[1]), middle(mx.subtract(M[1], M[2])))
    with mx.plan([mx.Job(recipe, {})], mx.EngineOptions(fuse="always")) as plan:
        assert set(plan.fused) == {"fused"}
    assert digest([recipe], True, fuse="always") == digest([recipe], True, fuse="never", tile_size=777)


def test_tiny_merges_are_not_compiled():
    with mx.plan([mx.Job(RECIPES["ties"][0], {})]) as plan:
        assert set(plan.fused) == {"eager: too small to be worth compiling"}


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test finds of numba is not remembered after it."""
    yield
    jit.can_compile.cache_clear()


def test_without_numba_torch_gives_the_same_bytes(monkeypatch, forgotten):
    expected = digest(RECIPES["ties"], statistics=True, fuse="always")
    monkeypatch.setitem(sys.modules, "numba", None)
    jit.can_compile.cache_clear()
    with mx.plan([mx.Job(RECIPES["ties"][0], {})], mx.EngineOptions(fuse="always")) as plan:
        assert set(plan.fused) == {"eager: numba is not installed"}
    assert digest(RECIPES["ties"], statistics=True, fuse="always") == expected


# the cache of compiled loops

PROGRAM = """
import hashlib, sys, torch, mecha_exp as mx
from mecha_exp.engine.compiler import jit, object_file
tensors = [{"w": torch.linspace(-1, 1, 1001) * m} for m in (1, 3)]
job = mx.Job(mx.weighted_sum(*map(mx.model, tensors), alpha=0.3), {})
if "{way}" == "numba":
    object_file.is_possible = lambda: False
mx.merge_many([job], mx.EngineOptions(fuse="always"))
print(hashlib.sha256(job.output["w"].numpy().tobytes()).hexdigest(), "numba" in sys.modules)
"""


def start(cache, way="objects"):
    home = {"HOME": str(cache), "XDG_CACHE_HOME": str(cache)}  # where loops go if the cache cannot be used
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **home, **path, "MECHA_EXP_CACHE": str(cache)}
    command = [sys.executable, "-c", PROGRAM.replace("{way}", way)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def result(process):
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    digest, compiled = out.split()
    return digest, compiled == "True"


@pytest.mark.heavy
@pytest.mark.skipif(not object_file.is_possible(), reason="objects are for Linux")
def test_the_cache_serves_the_next_process_without_numba_and_a_broken_one_does_no_harm(tmp_path):
    cache = tmp_path / "cache"
    both = [start(cache), start(cache)]
    (expected, _), (other, _) = map(result, both)
    assert other == expected
    assert result(start(cache)) == (expected, False)
    (file,) = cache.rglob("*.o")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    (tmp_path / "file").write_text("not a folder")
    processes = [start(cache), start(tmp_path / "file")]
    assert [result(p) for p in processes] == [(expected, True)] * 2
    assert file.read_bytes() == whole


@pytest.mark.heavy
def test_what_numba_keeps_serves_where_objects_cannot(tmp_path):
    expected, _ = result(start("off"))
    assert result(start(tmp_path, "numba")) == (expected, True)
    kept = list(tmp_path.rglob("*.nb*"))
    assert kept
    for file in kept:
        file.write_bytes(b"broken")
    assert result(start(tmp_path, "numba")) == (expected, True)


@pytest.mark.skipif(not object_file.is_possible(), reason="objects are for Linux")
def test_a_loop_that_needs_more_than_the_c_library_is_no_object():
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    from mecha_exp.engine.compiler.kernels.intrinsics import array_at

    @intrinsic
    def foreign(context):
        def build(context, builder, signature, args):
            kind = ir.FunctionType(ir.IntType(64), [])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, "NRT_Allocate"), [])

        return types.int64(), build

    def stores(start, count, table):
        array_at(table, 1, types.int64)[0] = start + count

    def calls(start, count, table):
        array_at(table, 1, types.int64)[0] = foreign()

    code = object_file.build(stores)
    with pytest.raises(ValueError, match="needs NRT_Allocate"):
        object_file.build(calls)
    place = torch.zeros(1, dtype=torch.int64)
    object_file.NativeLoop(code)(3, 4, place.data_ptr())
    assert place.item() == 7


@pytest.mark.skipif(not object_file.is_possible(), reason="objects are for Linux")
def test_a_loop_that_is_dropped_takes_nothing_of_the_others_with_it():
    def nothing(start, count, table):
        pass

    code = object_file.build(nothing)
    for _ in range(20):
        object_file.NativeLoop(code)(0, 0, 0)
        gc.collect()

    object_file.NativeLoop(object_file.build(nothing))(0, 0, 0)


@merge_method(rowwise=True, register=False)
def row_itself(a: Parameter(Tensor)) -> Return(Tensor):
    """Its argument, as no loop may write over it."""
    return a


@merge_method(rowwise=True, register=False)
def by_largest(a: Parameter(Tensor)) -> Return(Tensor):
    """The rows over their largest magnitude."""
    return a / a.abs().amax(-1, keepdim=True)


@merge_method(elementwise=True, register=False)
def product(a: Parameter(Tensor), b: Parameter(Tensor), s: Parameter(Tensor, "param") = 2.0) -> Return(
    Tensor
):
    """s a b."""
    return a * b * s


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "recipe",
    [
        lambda a, b: product(row_itself(a), b),
        lambda a, b: product(by_largest(product(a, b)), product(row_itself(product(a, a)), b)),
        lambda a, b: product(by_largest(a), b, mx.kth_magnitude(by_largest(a), k=0.2)),
        lambda a, b: product(a, b, mx.dot(by_largest(a), b)),
    ],
    ids=["its argument", "between loops", "ranked", "added up"],
)
def test_what_lies_beside_rows_is_fused_with_the_same_bytes(recipe, dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = (mx.model({"w": torch.randn(700, 96, generator=generator).to(dtype)}) for _ in range(2))
    outputs = {}
    for fuse in ("never", "always"):
        for tile_size in (1 << 11, 1 << 20):
            outputs[fuse, tile_size] = {}
            job = mx.Job(recipe(a, b), outputs[fuse, tile_size])
            mx.merge_many([job], mx.EngineOptions(fuse=fuse, tile_size=tile_size))

    assert len({output["w"].numpy().tobytes() for output in outputs.values()}) == 1


def test_the_plan_says_that_rows_are_left_to_torch():
    a, b = (mx.model({"w": torch.ones(4, 3)}) for _ in range(2))
    said = {}
    recipes = {"beside": product(by_largest(a), b), "alone": by_largest(a), "sum": norm_of_rows(a, b)}
    for name, recipe in recipes.items():
        with mx.plan([mx.Job(recipe, {})], mx.EngineOptions(fuse="always")) as plan:
            said[name] = set(plan.fused)

    assert said["beside"] == {"fused but for rows"}
    assert said["alone"] == {"eager: it works on rows"}
    assert said["sum"] == {"eager: it works on rows", "fused"}


def norm_of_rows(a, b):
    """A product with a sum over rows, which loops would add up in another order."""
    return product(a, b, mx.dot(by_largest(a), b))

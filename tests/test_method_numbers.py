"""Numbers of every merge method: no size of the weights that is built in, and no digits that cancel out.

The methods come from the registry. One that lacks a property is declared with the reason, and a declaration
that is not needed fails.
"""

from collections.abc import Callable, Mapping

import pytest
import torch
from method_cases import MASKS, MERGES, METHODS, bound, ids
from state_dicts import StateDict, contents
from torch import Tensor

import mecha_exp as m
from mecha_exp.method_api.method import MergeMethod

SHAPES = {"square": (6, 6), "wide": (4, 9), "tall": (9, 4), "vector": (7,), "kernel": (3, 2, 3, 3)}
IN_UNITS_OF_WEIGHTS = {
    "nearswap": ("t",),
    "ram": ("epsilon",),
    "ramplus": ("epsilon",),
    "ramplus_tl": ("epsilon",),
}
"""Hyperparameters that are sizes of weights: with other weights they are others."""


def near_models(change: float, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[StateDict]:
    """Three experts and their base: of a standard deviation of 0.02, the experts `change` of it away."""
    generator = torch.Generator().manual_seed(3)
    base = {key: 0.02 * torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
    moved = [
        {key: w + change * 0.02 * torch.randn(w.shape, generator=generator) for key, w in base.items()}
        for _ in range(3)
    ]
    return [{key: scale * w.to(dtype) for key, w in model.items()} for model in (*moved, base)]


def whole(method: MergeMethod, node: m.RecipeNode, like: StateDict) -> m.RecipeNode:
    """What a method makes; a mask, of zeros to which it is added times ones."""
    if method not in MASKS:
        return node
    zeros, ones = ({key: torch.full_like(w, x) for key, w in like.items()} for x in (0.0, 1.0))
    return m.add_difference(zeros, m.subtract(ones, zeros), alpha=node)


def merged(
    method: MergeMethod,
    models: list[StateDict],
    scale: float = 1.0,
    dtype: torch.dtype | str = "auto",
    **choices: object,
) -> StateDict:
    """What a method makes of models, in float64."""
    sizes = {
        spec.name: scale * spec.default
        for spec in method.signature.parameters
        if spec.name in IN_UNITS_OF_WEIGHTS.get(method.identifier, ())
    }
    node = whole(method, bound(method, models, **sizes, **choices), models[0])
    return m.merge(node, options=m.EngineOptions(compute_dtype=dtype, workers=1), dtype=torch.float64)


def held(checks: Mapping[str, bool], method: MergeMethod, declared: Mapping[str, str]) -> None:
    """Check that a property holds for all keys, or is declared not to and does not."""
    if method.identifier in declared:
        assert not all(checks.values()), f"declared for nothing: {declared[method.identifier]}"
    else:
        assert all(checks.values()), [key for key, holds in checks.items() if not holds]


SIZE_MATTERS = {
    "arcee_fusion": "the softmax of weights",
    "doge": "eta is the size that each task vector gets, and the rate of Adam one of weights",
    "pcb": "the tanh of products of weights",
    "wudi": "the rate of Adam is a size of weights, and so is the 1e-8 that it adds to a root",
}


def scaled_alike(method: MergeMethod, sizes: tuple[float, ...], **choices: object) -> dict[str, bool]:
    """Whether models times a size give the merge times that size, by key."""
    plain = merged(method, near_models(0.1, torch.float64), **choices)
    checks = {}
    for size in sizes:
        made = merged(method, near_models(0.1, torch.float64, size), size, **choices)
        size = 1.0 if method in MASKS else size
        for key, w in plain.items():
            checks[f"{key} times {size}"] = bool((made[key] / size - w).norm() <= 1e-9 * w.norm())
    return checks


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_models_of_any_size_give_the_merge_of_that_size(method):
    sizes = (2.0**-20, 2.0**20)  # 1e-6 and 1e6: powers of two, by which a number is scaled exactly

    held(scaled_alike(method, sizes), method, SIZE_MATTERS)


CHOICES = [
    (method, spec.name, choice)
    for method in METHODS
    for spec in method.signature.parameters
    if not spec.is_model and method.identifier not in SIZE_MATTERS
    for choice in (spec.choices or ((True, False) if spec.interface is bool else ()))
    if choice != spec.default
]


@pytest.mark.parametrize(
    ("method", "name", "choice"), CHOICES, ids=[f"{x[0].identifier} {x[1]}={x[2]}" for x in CHOICES]
)
def test_no_choice_has_a_size_of_its_own(method, name, choice):
    checks = scaled_alike(method, (2.0**-20,), **{name: choice})

    assert all(checks.values()), [key for key, holds in checks.items() if not holds]


CANCELS = {"wudi": "a step of Adam, 1e-5, is larger than the smallest of these changes: it goes to and fro"}


@pytest.mark.parametrize("method", MERGES, ids=ids)
def test_near_the_base_float32_comes_to_what_float64_does(method):
    checks = {}
    for change in (1e-2, 1e-5):
        models = near_models(change)
        single, double = (merged(method, models, dtype=dtype) for dtype in (torch.float32, torch.float64))
        for key, exact in double.items():
            size = max(exact.norm(), models[0][key].norm())
            moved = min((exact - model[key]).norm() for model in models)
            allowed = 4e-7 * size + 1e-4 * min(moved, exact.norm())
            checks[f"{key} at {change}"] = bool((single[key] - exact).norm() <= allowed)
    held(checks, method, CANCELS)


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_files_in_float64_are_merged_like_the_same_numbers_in_float32(method):
    wide, narrow = near_models(0.1, torch.float64), near_models(0.1)
    before = [contents(model) for model in (*wide, *narrow)]

    made = merged(method, wide)

    assert contents(made) == contents(merged(method, wide, dtype=torch.float64))
    assert contents(made) == contents(merged(method, narrow, dtype=torch.float64))
    assert [contents(model) for model in (*wide, *narrow)] == before


# what docstrings promise of matrices of each kind

MATRICES = [(9, 4), (4, 9), (6, 6), (5, 6), (1, 5)]


def pair(shape: tuple[int, int], rank: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    if rank is not None:
        u, s, vh = torch.linalg.svd(second, full_matrices=False)
        second = u[:, :rank] * s[:rank] @ vh[:rank]
    return first, second


def turned(a: Tensor, b: Tensor, alignment: float) -> Tensor:
    node = m.rotate(m.model({"w": a}), m.model({"w": b}), alignment=alignment, centralization=0.0)
    return m.merge(node)["w"]


@pytest.mark.parametrize("rank", [None, 1, 2])
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_rotate_turns_rows_as_one_rotation_and_comes_as_near_as_any(shape, rank):
    a, b = pair(shape, rank)
    u, _, vh = torch.linalg.svd(a.mT @ b)  # Schoenemann's solution, with all columns

    made = turned(a, b, 1.0)

    assert (made - b).norm().item() == pytest.approx((a @ u @ vh - b).norm().item())
    for part in (1.0, 0.5, 0.25, -1.0, 1.7):
        rows = turned(a, b, part)
        torch.testing.assert_close(rows @ rows.mT, a @ a.mT, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_the_rest_of_a_turn_leads_to_where_the_whole_turn_does(shape):
    a, b = pair(shape)

    torch.testing.assert_close(turned(turned(a, b, 0.3), b, 1.0), turned(a, b, 1.0))


@pytest.mark.parametrize("shape", MATRICES[:4], ids=str)
def test_isotropic_task_vectors_have_one_singular_value(shape):
    a, b = pair(shape)

    made = m.merge(m.iso_c({"w": torch.zeros_like(a)}, {"w": a}, {"w": b}))["w"]

    sizes = torch.linalg.svdvals(made)
    torch.testing.assert_close(sizes, sizes[:1].expand(len(sizes)))


@pytest.mark.parametrize("shape", MATRICES[:4], ids=str)
def test_a_truncated_difference_is_as_near_as_its_rank_allows(shape):
    a, _ = pair(shape)

    made = m.merge(m.truncate_rank(m.model({"w": a}, "delta"), rank=2, use_approximate_basis=False))["w"]

    sizes = torch.linalg.svdvals(a)
    assert torch.linalg.matrix_rank(made) == 2
    assert (made - a).norm().item() == pytest.approx(sizes[2:].norm().item())


# what was merged without a word, or wrongly

SMALL = 1e-5
"""The standard deviation of the changes that a little training makes."""


def stocked(filter_wise: bool, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(768, generator=generator, dtype=torch.float64)
    deltas = [common + 0.5 * torch.randn(768, generator=generator).double() for _ in range(2)]
    base = torch.zeros(768, dtype=torch.float64)
    node = m.model_stock_pairwise({"w": base}, *({"w": size * d} for d in deltas), filter_wise=filter_wise)
    cosine = torch.nn.functional.cosine_similarity(*deltas, dim=0)
    t = 2 * cosine / (1 + cosine)
    return m.merge(node)["w"] / (size * t * sum(deltas) / 2)


@pytest.mark.parametrize("filter_wise", [False, True])
@pytest.mark.parametrize("size", [1.0, SMALL, SMALL**2])
def test_model_stock_goes_as_far_as_the_paper_says_however_small_the_change(filter_wise, size):
    torch.testing.assert_close(stocked(filter_wise, size), torch.ones(768).double())


@pytest.mark.parametrize("count", [2, 3])
def test_the_mean_on_the_sphere_loses_no_small_tensor_and_no_small_model(count):
    models = [torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]), torch.tensor([3.0, 3.9])][:count]
    sizes = [1e-7, 1e-7, 1.0][:count]

    made, plain = (
        m.merge(m.karcher(*({"w": (x * size).double()} for x, size in zip(models, each, strict=True))))["w"]
        for each in (sizes, [1.0] * count)
    )

    torch.testing.assert_close(made / made.norm(), plain / plain.norm())
    lost = m.karcher(*({"w": x * size} for x, size in zip(models, sizes, strict=True)), zero_below=1e-5)
    assert not torch.allclose(m.merge(lost)["w"].double() / made.norm(), made / made.norm(), rtol=1e-3)


@pytest.mark.parametrize("columns", [40, 300])
@pytest.mark.parametrize("change", [1e-2, 1e-4, 1e-6])
def test_what_arcee_fusion_takes_is_no_rounding_error(columns, change):
    generator = torch.Generator().manual_seed(0)
    base = 0.02 * torch.randn(60, columns, generator=generator)
    tuned = base + change * torch.randn(60, columns, generator=generator)
    p, q = tuned.double().softmax(-1), base.double().softmax(-1)
    apart = (tuned.double() - base.double()) - (q * (tuned.double() - base.double())).sum(-1, keepdim=True)
    divergence = (p * apart).sum(-1) - (q * apart.expm1()).sum(-1).log1p()
    score = (tuned.double() - base.double()).abs() * divergence.unsqueeze(-1)
    ends = score.flatten().sort().values
    places = [int(part * (ends.numel() - 1)) for part in (0.25, 0.5, 0.75)]

    made = m.merge(m.arcee_fusion({"w": base}, {"w": tuned}))["w"]

    lower, middle, upper = (ends[place] for place in places)
    wanted = score >= middle + 1.5 * (upper - lower)
    assert ((made != base) != wanted).sum() <= 0.001 * wanted.sum() + 2


def test_consensus_of_more_tasks_than_there_are_is_refused():
    base, expert = {"w": torch.zeros(3)}, {"w": torch.ones(3)}

    with pytest.raises(m.RecipeError, match=r"least: 2 is more than the 1 task there are.*Give 1 at most"):
        m.merge(m.consensus(base, expert))
    assert m.merge(m.consensus(base, expert, least=1))["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", ["int8", "complex64", "bool", torch.int64, "float8_e8m0fnu"])
@pytest.mark.parametrize("way", ["output", "cast", "by key", "inner cast"])
def test_values_with_fractions_are_not_stored_as_what_has_none(dtype, way):
    models = [m.model({"w": torch.ones(3)}), m.model({"w": torch.zeros(3)})]
    node = m.n_average(*models)
    ways: dict[str, Callable[[], object]] = {
        "output": lambda: m.merge(node, output_dtype=dtype),
        "by key": lambda: m.merge(node, output_dtype={"w": dtype}),
        "cast": lambda: m.merge(node.to(dtype=dtype)),
        "inner cast": lambda: m.merge(m.n_average(node.to(dtype=dtype), models[0])),
    }

    with pytest.raises(m.MechaError, match=r"merged values have fractions, so they are stored as one of"):
        ways[way]()


NOT_FUSED = {
    "add_cosine_a": "it works on rows",
    "add_cosine_b": "it works on rows",
    "copy_region": "copy_rows: it asks where its tile lies",
    "euclidean_add_difference": "mean_square: 'sqrt' is not in the table of operations",
    "extract": "it works on rows",
    "geometric_sum": "geometric_mean: 'pow' is not in the table of operations",
    "multiply_difference": "multiply_difference: 'pow' is not in the table of operations",
    "multiply_quotient": "multiply_quotient: 'log' is not in the table of operations",
    "pcb": "balanced_mean: 'maximum' is not in the table of operations",
    "tensor_sum": "copy_rows: it asks where its tile lies",
}
"""The methods of which a pass runs by torch, operation by operation, which takes several times as long."""


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_a_method_is_fused_into_loops_or_declared_not_to_be(method):
    node = whole(method, bound(method, near_models(0.1)), near_models(0.1)[0])
    with m.plan([m.Job(node, {})], m.EngineOptions(fuse="always")) as planned:
        reasons = [way.removeprefix("eager: ") for way in planned.fused if way.startswith("eager")]

    declared = NOT_FUSED.get(method.identifier)
    assert reasons == ([declared] if declared else [])

"""Numbers of the whole model: exact on any schedule, shared, planned, resumed; and what needs them.

The authors' formulas are written out in plain torch over task vectors that are flattened in the order of
their sorted keys.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from authors import mean_of_agreeing, official_ties_merging
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import mecha_exp as m
from mecha_exp.engine.code_hash import code_hash
from mecha_exp.engine.ir.order_statistic import RUN, SAMPLE, in_whole_blocks, sample_of_model, sample_spans
from mecha_exp.engine.runtime import model_values
from mecha_exp.methods.reductions import column_products, dot, kth_magnitude, model_least_kept, squared_norm
from mecha_exp.terminal.plan import show_plan

StateDict = dict[str, Tensor]
Model = m.Parameter(Tensor)

SHAPES = {"a": (7, 5), "b": (), "c": (3, 2, 3, 3), "d": (300,), "e": (0, 4), "f": (20, 30)}
SCHEDULES = [
    m.EngineOptions(workers=workers, tile_size=tile_size, fuse="never")
    for workers, tile_size in ((1, 1 << 16), (3, 64), (2, 128))
]
FUSED = m.EngineOptions(workers=3, tile_size=1 << 12, fuse="always")


def drawn(count: int = 4, seed: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[StateDict]:
    """A base and experts, whose keys differ in their spread, beside a counter that is no weight."""
    generator = torch.Generator().manual_seed(seed)
    models = [
        {
            key: torch.randn(shape, generator=generator) * (1 + number % 3)
            for number, (key, shape) in enumerate(shapes.items())
        }
        for _ in range(count)
    ]
    return [{**model, "counter": torch.tensor(7)} for model in models]


def flat(model: StateDict) -> Tensor:
    return torch.cat([model[key].flatten() for key in sorted(model) if model[key].is_floating_point()])


def task_vectors(models: Sequence[StateDict]) -> Tensor:
    return torch.stack([flat(expert) - flat(models[0]) for expert in models[1:]])


def merged_on_every_schedule(node: m.Node, *more: m.EngineOptions) -> StateDict:
    first, *others = (m.merge(node, options=options) for options in (*SCHEDULES, *more))
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)
    return first


def check(node: m.Node, models: Sequence[StateDict], expected_delta: Tensor, *more: m.EngineOptions) -> None:
    made = merged_on_every_schedule(node, *more)

    torch.testing.assert_close(flat(made), flat(models[0]) + expected_delta, rtol=1e-6, atol=1e-6)
    assert torch.equal(made["counter"], models[0]["counter"])


# the methods


def paper_ties_merging(vectors: Tensor, kept: int) -> Tensor:
    """Trim the flat vectors to their `kept` largest entries; a zero sum elects no sign."""
    least = vectors.abs().topk(kept, dim=1).values[:, -1:]
    trimmed = torch.where(vectors.abs() >= least, vectors, 0)
    return mean_of_agreeing(trimmed, (trimmed.sign() == trimmed.sum(0).sign()) & (trimmed != 0))


@pytest.mark.parametrize("percent", [0.0, 20, 33, 90])
def test_official_ties_is_the_authors_ties_merging(percent):
    models = drawn()

    node = m.ties(*models, density=percent / 100, scale=0.7, variant="official")

    check(node, models, 0.7 * official_ties_merging(task_vectors(models), percent), FUSED)


def test_official_ties_gives_values_that_cancel_the_majority_sign():
    base = {"v": torch.zeros(4), "w": torch.zeros(3)}
    one = {"v": torch.tensor([2.0, 2, 2, -3]), "w": torch.tensor([-1.0, 0, -1])}
    other = {"v": torch.tensor([-2.0, 2, -2, 3]), "w": torch.tensor([-1.0, 0, -1])}

    made = merged_on_every_schedule(m.ties(base, one, other, density=0.9, variant="official"))

    expected = official_ties_merging(task_vectors([base, one, other]), 90)
    assert expected.tolist() == [-2, 2, -2, -3, -1, 0, -1]  # most entries of the model are negative
    assert torch.equal(flat(made), expected)


@pytest.mark.parametrize("ties_kept", [True, False])
@pytest.mark.parametrize("k", [0.2, 1.0])
def test_ties_of_the_paper_trims_the_whole_model(k, ties_kept):
    models = drawn(seed=1)
    vectors = task_vectors(models)

    node = m.ties(*models, density=k, variant="paper", trim="global", ties_kept=ties_kept)

    check(node, models, paper_ties_merging(vectors, int(k * vectors.shape[1])))


def test_dare_with_ties_trims_the_whole_of_what_was_not_dropped():
    base, expert = drawn(2, seed=5)
    settings = {"density": 0.6, "seed": 3, "variant": "paper"}
    (dropped,) = task_vectors([base, m.merge(m.dare_ties(base, expert, **settings))])

    node = m.dare_ties(base, expert, **settings, k=0.3, trim="global")

    check(node, [base], paper_ties_merging(dropped[None], int(0.3 * len(dropped))))


def test_metagpt_weighs_by_squared_norms_of_whole_task_vectors():
    models = drawn(seed=2)
    vectors = task_vectors(models).double()
    squares = vectors.square().sum(1)

    node = m.metagpt(*models, scale=0.5)

    check(node, models, 0.5 * (squares / squares.sum() @ vectors).float())


def test_metagpt_of_models_that_are_the_base_is_the_base():
    base, *_ = drawn()

    made = m.merge(m.metagpt(base, dict(base), {key: value.clone() for key, value in base.items()}))

    assert torch.equal(flat(made), flat(base))


def test_ram_plus_counts_over_the_whole_model():
    models = drawn(seed=3)
    vectors = task_vectors(models)
    changed = vectors.abs() > 2
    users = changed.sum(0)
    shared, alone = (changed & (users > 1)).sum(1).double(), (changed & (users == 1)).sum(1).double()
    factors = 1 + 0.3 * (shared / alone).clamp(max=0.9).float()
    own = (torch.where(changed, vectors, 0) * factors[:, None]).sum(0)
    mean = torch.where(changed, vectors, 0).sum(0) / users.clamp(min=1)

    node = m.ramplus(*models, epsilon=2, r=0.3, alpha=0.9)

    check(node, models, torch.where(users > 1, mean, own))


@pytest.mark.heavy
def test_compiled_loops_give_the_same_bytes():
    models = drawn(seed=4)
    nodes = [
        m.metagpt(*models),
        m.ramplus(*models, epsilon=2, r=0.3, alpha=0.9),
        m.ties(*models, density=0.2, variant="paper", trim="global", ties_kept=False),
        m.ties(*models, density=0.2, variant="official", elect="count", combine="sum"),
    ]
    for node in nodes:
        merged_on_every_schedule(node, FUSED)


# the numbers


@m.merge_method(elementwise=True, register=False)
def filled(a: Model, value: m.Parameter(Tensor, "param")) -> m.Return(Tensor):
    return torch.where(a == a, value, value)


@m.merge_method(composite=True, register=False)
def number_of_model(a: Model, name: m.Parameter(str), k: m.Parameter(float) = 0.2) -> m.Return(Tensor):
    more = {"k": k} if name == "model_kth_magnitude" else {}
    models = (a, a) if name == "model_dot" else (a,)
    return filled(a, getattr(m, name)(*models, **more))


@pytest.mark.parametrize(
    ("name", "formula"),
    {
        "model_squared_norm": lambda x: x.square().sum(),
        "model_norm": lambda x: x.norm(),
        "model_dot": lambda x: x @ x,
        "model_mean": lambda x: x.mean(),
        "model_kth_magnitude": lambda x: x.abs().sort().values[int((1 - 0.2) * len(x)) - 1],
    }.items(),
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_number_of_the_model_is_over_all_its_weights(name: str, formula: Callable[[Tensor], Tensor]):
    (model,) = drawn(1)
    model = {**model, "half": torch.arange(5.0).half()}

    values = flat(merged_on_every_schedule(number_of_model(model, name)) | {"half": torch.zeros(0)})

    assert len(values.unique()) == 1
    torch.testing.assert_close(values[0].double(), formula(flat(model).double()), rtol=1e-6, atol=0)


LARGE = {"a": (400, 300), "b": (7,), "c": (5000, 31), "d": (90_000,), "e": (1,), "f": (2, 40_000)}


def large(kind: str) -> StateDict:
    """More entries than a sample holds: of unlike spread, mostly equal, or arranged to mislead a sample."""
    model = drawn(1, shapes=LARGE)[0]
    if kind == "mostly equal":
        return {key: value.sign() if value.is_floating_point() else value for key, value in model.items()}
    if kind == "misleading":
        total = sum(value.numel() for value in model.values() if value.is_floating_point())
        values = torch.linspace(1, 2, total)
        for start, stop in sample_spans(total, 1):
            values[start:stop] *= 1e-3
        ends = torch.tensor([torch.Size(shape).numel() for shape in LARGE.values()]).cumsum(0).tolist()
        parts = values.tensor_split(ends[:-1])
        return {key: part.reshape(LARGE[key]).contiguous() for key, part in zip(LARGE, parts, strict=True)}
    return model


@pytest.mark.parametrize(
    ("kind", "trips"), [("of unlike spread", {2}), ("mostly equal", {2, 3}), ("misleading", {3, 4})]
)
@pytest.mark.parametrize("density", [0.001, 0.2, 0.97])
def test_the_entry_of_a_rank_is_exact_in_a_model_that_is_sampled(kind, trips, density, monkeypatch):
    model = large(kind)
    made_trips: list[int] = []
    go = model_values._TripRun._go
    monkeypatch.setattr(
        model_values._TripRun, "_go", lambda run, keys, *rest: (made_trips.append(1), go(run, keys, *rest))
    )
    values = flat(model).abs().sort(descending=True).values

    @m.merge_method(composite=True, register=False)
    def least(a: Model) -> m.Return(Tensor):
        return filled(a, model_least_kept(a, density=density, variant="paper"))

    for options in (SCHEDULES[0], FUSED):
        made_trips.clear()
        made = m.merge(least(model), options=options)
        assert made["a"].unique().tolist() == [values[int(density * len(values)) - 1].item()]
        assert len(made_trips) in trips  # over a sample, over all data, and again where that was not enough


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=40), st.integers(0, 3 * SAMPLE))
def test_a_sample_of_a_model_is_that_of_its_keys_one_after_the_other(counts, more):
    counts = [*counts, 1 + more * 4]
    by_key = sample_of_model(counts)

    starts = [sum(counts[:index]) for index in range(len(counts))]
    parts = [(s + x, s + y) for s, spans in zip(starts, by_key, strict=True) for x, y in spans]
    assert all(x < y for x, y in parts)
    taken = torch.zeros(sum(counts), dtype=torch.int8)
    for x, y in parts:
        taken[x:y] += 1
    expected = torch.zeros_like(taken)
    for x, y in sample_spans(sum(counts), 1):
        expected[x:y] += 1
    assert torch.equal(taken, expected)


@given(st.integers(1, 50_000), st.integers(1, 3 * RUN), st.data())
def test_parts_that_are_widened_to_blocks_hold_them_and_do_not_overlap(count, block, data):
    ends = sorted(data.draw(st.sets(st.integers(0, count), min_size=2, max_size=12)))
    spans = list(zip(ends[::2], ends[1::2], strict=False))

    widened = in_whole_blocks(spans, count, block)

    assert all(any(x <= start and stop <= y for x, y in widened) for start, stop in spans)
    assert all(x % block == 0 and (y % block == 0 or y == count) for x, y in widened)
    assert all(one[1] < other[0] for one, other in pairwise(widened))


# which keys count


def expert_and_base(**changes: Tensor) -> tuple[StateDict, StateDict]:
    base = {"v": torch.zeros(4), "w": torch.zeros(2)}
    return base, {"v": torch.tensor([4.0, 3, 2, 1]), "w": torch.tensor([8.0, 6]), **changes}


def kept(node: m.Node, **options: Any) -> list[float]:
    return flat(m.merge(node, options=m.EngineOptions(**options))).tolist()


def test_a_key_whose_strength_is_0_counts_all_the_same():
    base, expert = expert_and_base()

    node = m.ties(base, expert, density=0.5, variant="paper", trim="global", scale={"w": 0.0, "default": 1.0})

    assert kept(node) == [4, 0, 0, 0, 0, 0]


def test_running_statistics_under_their_policy_and_keys_that_are_missing_do_not_count():
    base, expert = expert_and_base(extra=torch.ones(6))
    statistics = {"norm.running_mean": torch.zeros(9), "norm.running_var": torch.ones(9)}
    far = {key: value + 100 for key, value in statistics.items()}
    node = m.ties(base | statistics, expert | far, density=0.5, variant="paper", trim="global")

    made = m.merge(node, options=m.EngineOptions(on_missing="skip"))

    assert [*made["v"].tolist(), *made["w"].tolist()] == [4, 0, 0, 0, 8, 6]
    assert torch.equal(made["norm.running_mean"], statistics["norm.running_mean"])


@m.merge_method(choice=True, register=False)
def v_or_rest(
    v: m.Parameter(m.StateDict[Tensor]), rest: m.Parameter(m.StateDict[Tensor]), **extra: object
) -> m.Return(Tensor):
    return v if extra["key"] == "v" else rest


def test_two_methods_of_which_each_has_its_part_count_the_keys_of_their_own():
    base, expert = expert_and_base()
    ties = m.ties(base, expert, density=0.5, variant="paper", trim="global")

    assert kept(v_or_rest(ties, m.metagpt(base, expert))) == [4, 3, 0, 0, 8, 6]
    assert kept(v_or_rest(m.metagpt(base, expert), ties)) == [4, 3, 2, 1, 8, 0]


def test_one_method_of_which_parts_have_different_models_is_refused():
    base, expert = expert_and_base()
    other = {key: 2 * value for key, value in expert.items()}

    with pytest.raises(m.RecipeError, match=r"'model_squared_norm' is one number for the whole model, but"):
        m.merge(v_or_rest(m.metagpt(base, expert), m.metagpt(base, other)))


def test_each_density_has_a_threshold_of_the_whole_model():
    base, expert = expert_and_base()

    node = m.ties(base, expert, density={"v": 0.5, "w": 1 / 6}, variant="paper", trim="global")

    assert kept(node) == [4, 0, 0, 0, 8, 0]


def test_adapters_of_some_keys_are_read_as_differences(tmp_path):
    base, expert = expert_and_base()
    save_file({"v": expert["v"]}, tmp_path / "delta.safetensors")

    delta = m.model(tmp_path / "delta.safetensors", merge_space="delta")
    node = m.ties(m.model(base), delta, density=0.5, variant="paper", trim="global")

    assert kept(node, on_missing="base") == [4, 3, 0, 0, 0, 0]


# what is refused


def test_what_is_reduced_must_be_the_same_at_all_keys():
    _, expert = expert_and_base()

    @m.merge_method(composite=True, register=False)
    def scaled(a: Model, alpha: m.Parameter(float)) -> m.Return(Tensor):
        return filled(a, m.model_norm(m.passthrough(a, scale=alpha)))

    with pytest.raises(m.RecipeError, match=r"'model_squared_norm' is one number .* 'v' .* at w\. Values by"):
        m.merge(scaled(expert, alpha={"v": 0.5, "w": 0.3}))


def test_ranks_of_keys_in_two_dtypes_are_refused_and_sums_are_not():
    model = {"v": torch.ones(3), "w": torch.ones(4, dtype=torch.float64)}

    assert m.merge(number_of_model(model, "model_squared_norm"))["v"].tolist() == [7] * 3
    with pytest.raises(m.RecipeError, match=r"F32 \('v'\) and others in F64 \('w'\).*compute_dtype=float64"):
        m.merge(number_of_model(model, "model_kth_magnitude"))
    options = m.EngineOptions(compute_dtype=torch.float64)
    assert m.merge(number_of_model(model, "model_kth_magnitude"), options=options)["v"].tolist() == [1] * 3


def test_a_key_that_is_not_finite_is_named():
    base, expert = expert_and_base(w=torch.tensor([torch.nan, 1]))

    with pytest.raises(m.MergeError, match=r"the key 'w' has values that are not finite"):
        m.merge(m.metagpt(base, expert))
    with pytest.raises(m.MergeError, match=r"model_squared_norm: .* not finite: the key 'w' adds"):
        m.merge(m.metagpt(base, expert), options=m.EngineOptions(on_nonfinite="keep"))


def test_a_method_that_reads_other_keys_cannot_ask_for_it():
    base, expert = expert_and_base()

    @m.merge_method(register=False)
    def reading(a: m.Parameter(m.StateDict[Tensor]), **extra: object) -> m.Return(Tensor):
        return a[str(extra["key"])]

    with pytest.raises(m.MergeError, match=r"is a number of the whole model.*Merge that one to a file first"):
        m.merge(reading(m.metagpt(base, expert)))


@pytest.mark.parametrize("method", [column_products, m.whole_model(dot), m.subtract], ids=repr)
def test_only_sums_and_ranks_of_tensors_are_made_numbers_of_models(method):
    with pytest.raises(m.RecipeError, match=r"model_\w+: .*'\w+'"):
        m.whole_model(method)


@pytest.mark.parametrize("density", [-0.1, 1.5])
def test_a_density_out_of_range_is_refused(density):
    with pytest.raises(m.RecipeError, match="density"):
        m.ties(*drawn(), density=density, trim="global")


# sweeps, plans, resumption, signatures


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{index}.safetensors" for index in range(3)]
    for path, model in zip(paths, drawn(3), strict=True):
        save_file(model, path)
    return paths


def size_of(models: Sequence[StateDict]) -> int:
    return sum(value.nbytes for model in models for value in model.values() if value.is_floating_point())


def test_the_points_of_a_sweep_share_a_trip(files):
    points = [m.ties(*files, density=0.2, trim="global", scale=alpha) for alpha in (0.3, 0.5, 0.7)]
    made: list[StateDict] = [{} for _ in points]

    with m.plan([m.Job(point, {}) for point in points]) as planned:
        assert [len(trip.values) for trip in planned.trips] == [2]
        assert planned.bytes_of_trips == size_of([load_file(path) for path in files])
    m.merge_many([m.Job(point, output) for point, output in zip(points, made, strict=True)])

    for point, output in zip(points, made, strict=True):
        alone = m.merge(point)
        assert all(torch.equal(output[key], alone[key]) for key in alone)


def test_a_plan_says_that_trips_are_made(files, capsys):
    with m.plan([m.Job(m.ties(*files, density=0.2, variant="official"), {})]) as planned:
        show_plan(planned, [path.name for path in files], {})

    words = " ".join(capsys.readouterr().out.split())
    trip = "before one more trip over 5 keys, for the numbers of the whole model:"
    assert f"{trip} model_least_kept {trip} model_surplus_of_signs" in words


def test_an_interrupted_merge_goes_on_with_the_same_numbers(files, tmp_path, monkeypatch):
    node = m.metagpt(*files)
    whole = m.merge(node)
    job, options = m.Job(node, tmp_path / "out.safetensors"), m.EngineOptions(workers=1)
    trips = []
    find = model_values.find_model_values
    monkeypatch.setattr(
        "mecha_exp.engine.runtime.executor.find_model_values", lambda context: trips.append(find(context))
    )
    read: list[str] = []

    def interrupt(key: str, nbytes: int) -> None:
        read.append(key)
        if len(read) == 8:  # five keys of the trip, and some of the merge
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        m.merge_many([job], options, interrupt)
    report = m.merge_many([job], options)

    made = load_file(tmp_path / "out.safetensors")
    assert 0 < report.resumed_keys < len(whole)
    assert len(trips) == 2
    assert all(torch.equal(made[key], whole[key]) for key in whole)


def test_the_code_of_a_number_of_the_model_is_not_that_of_a_tensor():
    assert code_hash(m.whole_model(squared_norm)) == code_hash(m.model_squared_norm)
    assert code_hash(m.model_squared_norm) != code_hash(squared_norm)
    assert code_hash(m.model_kth_magnitude) != code_hash(kth_magnitude)


def test_elected_task_arithmetic_is_that_of_adamergings_code():
    """Flat vectors: trimmed at the int((1 - K) d)-th magnitude, zero sums by the majority of signs."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"a": (7, 5), "b": (11,), "c": (2, 3, 4)}

    def drawn() -> dict[str, torch.Tensor]:
        return {
            key: torch.randint(-3, 4, shape, generator=generator)
            + torch.rand(shape, generator=generator) / 64
            for key, shape in shapes.items()
        }

    base, *experts = ({key: tensor.double() for key, tensor in drawn().items()} for _ in range(4))
    for key in shapes:  # sums of zero
        experts[1][key][0] = 2 * base[key][0] - experts[0][key][0]
        experts[2][key][0] = base[key][0]
    weights = [0.3, 0.9, 0.5]

    merged = m.merge(
        m.elected_task_arithmetic(base, *experts, weights=weights, density=0.4, variant="official")
    )

    flat = torch.stack([torch.cat([(e[key] - base[key]).flatten() for key in shapes]) for e in experts])
    count = flat.shape[1]
    least = flat.abs().kthvalue(count - int(count * 0.4), dim=1, keepdim=True).values
    flat = torch.where(flat.abs() >= least, flat, 0)
    sign = flat.sum(0).sign()
    sign[sign == 0] = sign.sum().sign()
    selected = flat * torch.where(sign > 0, flat > 0, flat < 0)
    expected = sum(weight * vector for weight, vector in zip(weights, selected, strict=True))
    got = torch.cat([(merged[key] - base[key]).flatten() for key in shapes])
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)

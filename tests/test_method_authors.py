"""Methods of 2024 to 2026 compute what their authors' code computes.

Each formula is written out here in plain torch over whole task vectors, without anything of mecha_exp.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from authors import (
    StateDict,
    as_a_whole,
    by_key,
    emr_parts,
    official_doge,
    official_fr_merging,
    official_iso_cts,
    official_own_part,
    official_pcb,
    official_star,
    official_wudi,
    stitched,
    task_vectors,
    wudi_loss,
)
from torch import Tensor

import mecha_exp as m

SHAPES = {"matrix": (12, 30), "tall": (26, 10), "vector": (40,), "number": (), "kernel": (6, 5, 3, 3)}
OPTIONS = m.EngineOptions(compute_dtype=torch.float64, workers=2, tile_size=64)


def drawn(seed: int = 0, count: int = 4, shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[StateDict]:
    """A base and experts, whose differences are as small as those of fine-tuning."""
    generator = torch.Generator().manual_seed(seed)
    base = {key: torch.randn(shape, generator=generator).double() for key, shape in shapes.items()}
    return [base] + [
        {key: x + 0.01 * torch.randn(x.shape, generator=generator).double() for key, x in base.items()}
        for _ in range(count - 1)
    ]


def check(node: m.Node, models: Sequence[StateDict], merged: StateDict, scale: float = 0.7) -> None:
    """Compare a merge with base + scale times a task vector."""
    made = m.merge(node, options=OPTIONS)
    for key, base in models[0].items():
        expected = base + scale * merged[key]
        torch.testing.assert_close(
            made[key], expected, rtol=1e-9, atol=1e-9, msg=lambda text, k=key: f"{k}: {text}"
        )


@pytest.mark.parametrize("common", [0.0, 0.5, 0.8, 1.0])
def test_iso_cts_joins_common_directions_with_those_of_each_task(common):
    models = drawn()

    node = m.iso_cts(*models, common=common, scale=0.7)

    check(node, models, by_key(lambda x: official_iso_cts(x, common))(task_vectors(models)))


def test_iso_cts_with_everything_in_common_is_iso_c():
    models = drawn(1)

    made, expected = (m.merge(x, options=OPTIONS) for x in (m.iso_cts(*models, common=1.0), m.iso_c(*models)))

    for key in SHAPES:
        torch.testing.assert_close(made[key], expected[key])


def test_a_matrix_with_fewer_directions_than_tasks_has_them_all_in_common():
    models = drawn(2, 8, {"w": (2, 30)})

    made, expected = (m.merge(x, options=OPTIONS) for x in (m.iso_cts(*models, common=0.1), m.iso_c(*models)))

    torch.testing.assert_close(made["w"], expected["w"])


@pytest.mark.parametrize("eta", [5.0, 40.0, 73.0])
def test_star_cuts_spectra_and_keeps_their_nuclear_norm(eta):
    models = drawn(3)

    node = m.star(*models, eta=eta, scale=0.7)

    check(node, models, by_key(lambda x: official_star(x, eta))(task_vectors(models)))


def test_star_with_the_whole_nuclear_norm_is_the_mean():
    models = drawn(4)

    check(m.star(*models, eta=100.0, scale=0.7), models, by_key(lambda x: x.mean(0))(task_vectors(models)))


@pytest.mark.parametrize(("steps", "rate"), [(300, 1e-5), (40, 1e-3), (0, 1e-5)])
def test_wudi_takes_the_steps_of_adam_that_autograd_takes(steps, rate):
    models = drawn(5)

    node = m.wudi(*models, steps=steps, rate=rate, scale=0.7)

    check(node, models, by_key(lambda x: official_wudi(x, steps, rate))(task_vectors(models)))


@pytest.mark.heavy
def test_the_closed_form_of_wudi_is_where_gradient_descent_ends():
    models = drawn(6, 4, {"w": (5, 24)})  # 3 tasks with 5 rows each: not all of the 24 columns are seen
    deltas = torch.stack([vector["w"] for vector in task_vectors(models)]) * 100

    made = (m.merge(m.wudi(*models, solver="closed"), options=OPTIONS)["w"] - models[0]["w"]) * 100

    merged = deltas.sum(0).requires_grad_()
    for _ in range(20_000):
        (slope,) = torch.autograd.grad(wudi_loss(merged, deltas), merged)
        merged = (merged - 0.3 * slope).detach().requires_grad_()
    torch.testing.assert_close(made, merged.detach(), rtol=1e-5, atol=1e-5)
    assert wudi_loss(made, deltas) <= wudi_loss(merged, deltas) + 1e-12


@pytest.mark.parametrize(
    "shape, rank", [((16, 96), 4), ((16, 96), 16), ((40, 24), 8), ((40, 24), 24), ((24, 40), 24)]
)
def test_the_closed_form_of_wudi_has_the_least_norm_of_all_minimisers(shape, rank):
    generator = torch.Generator().manual_seed(9)
    rows, columns = shape
    # multiples of 2^-12 are exact in float32, and so are the task vectors that are read off the models
    base = torch.randint(-100, 100, shape, generator=generator) / 4096
    left, right = (
        torch.randint(-3, 4, s, generator=generator) for s in ((3, rows, rank), (3, rank, columns))
    )
    deltas = (left @ right).double() / 4096
    models = [{"w": base}, *({"w": base + delta.float()} for delta in deltas), {"w": base.clone()}]

    made = m.merge(m.wudi(*models, solver="closed"))["w"] - base

    inputs = torch.cat([delta.T / delta.norm() for delta in deltas], 1)
    wanted = torch.cat([delta @ delta.T / delta.norm() for delta in deltas], 1)
    expected = wanted @ torch.linalg.pinv(inputs, rtol=1e-10)
    torch.testing.assert_close(made.double(), expected, rtol=1e-4, atol=1e-6)


def test_the_closed_form_of_wudi_refuses_what_is_not_finite():
    base, model = torch.zeros(4, 6), torch.ones(4, 6)
    model[1, 2] = torch.nan

    recipe = m.wudi({"w": base}, {"w": model}, {"w": base + 1}, solver="closed")
    with pytest.raises(
        m.MergeError, match=r"on the key 'w': .* the task vectors contain values that are not"
    ):
        m.merge(recipe, options=m.EngineOptions(on_nonfinite="keep"))


def test_other_tensors_get_the_mean_from_wudi_if_asked():
    models = drawn(7)

    made = m.merge(m.wudi(*models, others="mean"), options=OPTIONS)

    mean = sum(vector["vector"] for vector in task_vectors(models)) / 3
    torch.testing.assert_close(made["vector"], models[0]["vector"] + mean)


@pytest.mark.parametrize(("eta", "density", "subspace"), [(0.07, 0.3, 6), (0.5, 0.05, 2), (0.07, 0.99, 40)])
def test_doge_takes_the_steps_of_adam_beside_the_shared_directions(eta, density, subspace):
    models = drawn(16)

    node = m.doge(*models, eta=eta, density=density, subspace=subspace, scale=0.7)

    check(node, models, official_doge(task_vectors(models), eta, density, subspace))


def test_the_sum_that_doge_lessens_grows_less_than_without_its_steps():
    models = drawn(17, shapes={"w": (12, 30)})
    deltas = torch.stack([vector["w"] for vector in task_vectors(models)])

    def gap(steps: int) -> Tensor:
        node = m.doge(*models, density=1.0, steps=steps, rate=1e-3)
        merged = m.merge(node, options=OPTIONS)["w"] - models[0]["w"]
        return (deltas * (merged - deltas)).sum(2).square().sum()

    assert gap(400) < 0.5 * gap(0)


def test_doge_counts_a_task_that_leaves_a_matrix_at_the_base_as_none():
    models = drawn(18, shapes={"w": (12, 30), "x": (9, 9)})
    idle = {key: base + (key == "x") for key, base in models[0].items()}

    made = m.merge(m.doge(*models, idle), options=OPTIONS)

    assert made["w"].isfinite().all()
    assert not torch.equal(made["w"], models[0]["w"])


def test_doge_of_one_model_is_its_task_vector_at_another_size():
    base, expert = drawn(19, 2, {"w": (8, 8)})

    made = m.merge(m.doge(base, expert, density=1.0, steps=0), options=OPTIONS)["w"] - base["w"]

    delta = expert["w"] - base["w"]
    torch.testing.assert_close(made, 0.07 * delta / delta.norm())


def test_other_tensors_get_the_mean_from_doge_if_asked():
    models = drawn(20)

    made = m.merge(m.doge(*models, others="mean", steps=1), options=OPTIONS)

    mean = sum(vector["kernel"] for vector in task_vectors(models)) / 3
    torch.testing.assert_close(made["kernel"], models[0]["kernel"] + mean)


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.5, 1.0])
def test_pcb_lets_the_entries_of_the_whole_model_compete(ratio):
    models = drawn(8, shapes={**SHAPES, "large": (200, 150)})

    node = m.pcb(*models, ratio=ratio, scale=0.7)

    check(node, models, as_a_whole(lambda x: official_pcb(x, ratio))(task_vectors(models)))


def test_magmax_takes_the_largest_change_of_each_entry():
    models = drawn(9)

    def largest(deltas: Tensor) -> Tensor:
        return deltas.gather(0, deltas.abs().argmax(0, keepdim=True))[0]

    check(m.magmax(*models), models, by_key(largest)(task_vectors(models)), scale=0.5)


def test_of_equal_changes_magmax_takes_that_of_the_last_model():
    models = [{"w": torch.tensor([x])} for x in (0.0, 2.0, -2.0, 1.0)]

    assert m.merge(m.magmax(*models, scale=1.0))["w"].item() == -2


@pytest.mark.parametrize("task", [0, 1, 2])
def test_emr_restores_a_task_by_its_signs_and_its_size(task):
    models = drawn(10)
    vectors = task_vectors(models)
    united, own = emr_parts(vectors, 0.0)

    def size(vector: StateDict, per_key: bool) -> float:
        return sum(float(x.abs().mean() if per_key else x.abs().sum()) for x in vector.values())

    paper, official = (size(vectors[task], k) / size(own[task], k) for k in (False, True))
    check(m.emr_unified(*models, scale=0.7), models, united)
    for variant, factor in (("paper", paper), ("official", official)):
        node = m.emr(*models, task=task, variant=variant, scale=0.7)
        check(node, models, {key: factor * x for key, x in own[task].items()})


def test_a_zero_sum_elects_no_sign_in_the_paper_of_emr_and_minus_in_its_code():
    base, up, down = ({"w": torch.tensor([x])} for x in (0.0, 1.0, -1.0))

    made = [m.merge(m.emr_unified(base, up, down, variant=v))["w"].item() for v in ("paper", "official")]

    assert made == [0, -1]


def test_a_task_of_emr_that_is_not_there_is_an_error():
    with pytest.raises(m.RecipeError, match="task: 3 is too high for 3 models: the first one is 0"):
        m.merge(m.emr(*drawn(), task=3))


def test_a_task_of_emr_by_block_has_no_scale_of_its_model():
    models = [{f"{part}.{key}": x for part in "ab" for key, x in model.items()} for model in drawn()]

    with pytest.raises(m.RecipeError, match="give one value for all keys"):
        m.merge(m.emr(*models, task={"a.*": 0, "default": 1}), options=OPTIONS)


@pytest.mark.parametrize("task", [0, 2])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_twin_adds_to_what_all_tasks_share_the_leading_parts_of_one_task(task, density):
    models = drawn(13)

    def formula(deltas: Tensor) -> Tensor:
        common = 0.3 * deltas.sum(0)
        return common + official_own_part(deltas[task] - common, density)

    node = m.twin(*models, task=task, density=density, scale=0.7)

    check(node, models, by_key(formula)(task_vectors(models)))


def test_twin_with_all_singular_parts_is_the_model_of_the_task():
    models = drawn(14)

    made = m.merge(m.twin(*models, task=1, density=1.0, shared=0.4), options=OPTIONS)

    for key in SHAPES:
        torch.testing.assert_close(made[key], models[2][key])


def test_twin_without_singular_parts_is_the_shared_expert():
    models = drawn(15)

    made, expected = (
        m.merge(node, options=OPTIONS)
        for node in (
            m.twin(*models, density=0.0, shared=0.4),
            m.task_arithmetic(*models, scale=0.4),
        )
    )

    for key in SHAPES:
        torch.testing.assert_close(made[key], expected[key])


def test_twin_counts_singular_parts_exactly_where_floats_lose_one():
    base, expert = torch.zeros(100, 100).double(), torch.arange(1.0, 101.0).diag().double()

    made = m.merge(m.twin({"w": base}, {"w": expert}, density=0.29, shared=0.0), options=OPTIONS)["w"]

    assert int(made.diagonal().ge(0.5).sum()) == 29  # int(0.29 * 100) is 28


def test_a_task_of_twin_that_is_not_there_is_an_error():
    with pytest.raises(m.RecipeError, match="task: 3 is too high for 3 models: the first one is 0"):
        m.merge(m.twin(*drawn(), task=3))


@pytest.mark.parametrize("density", [0.01, 0.05, 0.6])
def test_localize_and_stitch_keeps_the_largest_entries_of_whole_task_vectors(density):
    models = drawn(11)

    for variant in ("paper", "official"):
        node = m.localize_and_stitch(*models, density=density, variant=variant, scale=0.7)
        formula = as_a_whole(lambda x, v=variant: stitched(x, density, v == "official"))
        check(node, models, formula(task_vectors(models)))


def test_emr_restores_a_single_task_whose_entries_have_no_square_in_float32():
    expert = {"w": torch.tensor([1e-30, -3e-25, 0.0, 2.0])}

    made = m.merge(m.emr({"w": torch.zeros(4)}, expert))

    assert torch.equal(made["w"], expert["w"])


def test_iso_cts_leaves_out_directions_that_are_rounding_errors_of_tasks_that_cancel_out():
    generator = torch.Generator().manual_seed(2)
    delta = torch.outer(torch.randn(20, generator=generator), torch.randn(20, generator=generator))
    base = torch.zeros(20, 20)

    made = m.merge(m.iso_cts({"w": base}, {"w": delta}, {"w": -delta}))["w"]

    sizes = torch.linalg.svdvals(made)
    assert int((sizes > 1e-4).sum()) <= 2  # both tasks have one direction


def test_a_task_localises_no_entry_that_it_left_at_the_base():
    base, moved = torch.zeros(100), torch.arange(100.0)
    sparse = base.clone()
    sparse[99] = 3.0  # one entry, of the ten that may be localised

    made = m.merge(m.localize_and_stitch({"w": base}, {"w": sparse}, {"w": moved}, density=0.1))["w"]

    expected = torch.where(moved >= 90, moved, 0)
    expected[99] = (99 + 3) / 2
    assert torch.equal(made, expected)


def test_a_threshold_for_each_task_decides_who_uses_an_entry():
    models = drawn(12)
    thresholds = [0.2, 0.5, 1.5]

    def formula(deltas: Tensor) -> Tensor:
        others = (deltas.sum(0) - deltas).abs()
        used = [d.abs() >= t * o for d, t, o in zip(deltas, thresholds, others, strict=True)]
        return torch.where(sum(u.int() for u in used) >= 2, deltas.sum(0), 0)

    check(
        m.consensus(*models, threshold=thresholds, scale=0.7), models, by_key(formula)(task_vectors(models))
    )


# checkpoints of one run


def run_of(*values: float) -> list[dict[str, Tensor]]:
    return [{"w": torch.tensor([value], dtype=torch.float64)} for value in values]


def merged_value(node: m.Node) -> float:
    return m.merge(node, options=OPTIONS)["w"].item()


def test_wise_ft_lies_between_the_base_and_the_model():
    assert merged_value(m.wise_ft(*run_of(2.0, 6.0), alpha=0.25)) == 3


def test_lawa_is_the_mean_of_the_last_checkpoints():
    assert merged_value(m.lawa(*run_of(1, 2, 4, 8), last=2)) == 6
    assert merged_value(m.lawa(*run_of(1, 2, 4, 8))) == 3.75
    with pytest.raises(m.RecipeError, match="last: 5 checkpoints are asked for, and 4 are given"):
        m.merge(m.lawa(*run_of(1, 2, 4, 8), last=5))
    with pytest.raises(m.RecipeError, match="last: 5 checkpoints are asked for, and 1 is given"):
        m.merge(m.lawa(*run_of(1), last=5))


def test_ema_moves_towards_each_checkpoint():
    mean = 1.0
    for value in (2.0, 4.0, 8.0):
        mean = 0.7 * mean + 0.3 * value

    assert merged_value(m.ema(*run_of(1, 2, 4, 8), decay=0.7)) == pytest.approx(mean)


def test_wsm_is_the_run_with_smaller_steps():
    values, rates = (1.0, 2.0, 4.0, 8.0), (0.9, 0.5, 0.2)
    expected = 1.0 + 0.9 * 1 + 0.5 * 2 + 0.2 * 4

    assert merged_value(m.wsm(*run_of(*values), decay=list(rates))) == pytest.approx(expected)
    linear = [1 - i / 4 for i in (1, 2, 3)]
    assert merged_value(m.wsm(*run_of(*values), decay=linear)) == pytest.approx(sum(values) / 4)


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        ([0.5, 0.2], "2 numbers are given for 4 checkpoints. Give one, or 3"),
        ([0.5], "1 number is given for 4 checkpoints. Give one, or 3"),
        ([0.2, 0.5, 0.1], r"decay: \[0.2, 0.5, 0.1\] rises"),
    ],
)
def test_a_decay_that_is_none_is_refused(decay: Any, message: str):
    with pytest.raises(m.RecipeError, match=message):
        m.merge(m.wsm(*run_of(1, 2, 4, 8), decay=decay))


@pytest.mark.parametrize("radius", [0.0, 0.05, 0.2, 0.6, 0.9])
def test_fr_merging_filters_as_its_authors_do(radius):
    models = drawn(shapes={**SHAPES, "even": (20, 30)})

    node = m.fr_merging(*models, radius=radius, variant="official", scale=0.7)

    check(node, models, by_key(lambda x: official_fr_merging(x, radius))(task_vectors(models)))


def test_fr_merging_of_the_paper_counts_each_frequency_once():
    base, expert = drawn(count=2, shapes={"w": (20, 20)})
    delta = expert["w"] - base["w"]

    everything = m.merge(m.fr_merging(base, expert, radius=1.0, scale=1.0), options=OPTIONS)["w"]
    constant = m.merge(m.fr_merging(base, {"w": base["w"] + 0.5}, scale=1.0), options=OPTIONS)["w"]
    finest = m.merge(m.fr_merging(base, expert, radius=0.0, scale=1.0), options=OPTIONS)["w"] - base["w"]

    torch.testing.assert_close(everything, base["w"] + delta)
    torch.testing.assert_close(constant, base["w"])
    board = (-1.0) ** (torch.arange(20)[:, None] + torch.arange(20)).double()
    torch.testing.assert_close(finest, (delta * board).mean() * board)

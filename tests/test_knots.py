"""KnOTS computes what its authors' code computes, in a basis that the tasks share."""

import io
import tempfile

import pytest
import torch
from authors import StateDict, official
from torch import Tensor

import mecha_exp as m
from mecha_exp.methods.knots import shared_basis

OPTIONS = m.EngineOptions(compute_dtype=torch.float64, workers=2, tile_size=64)
SHAPES = {"wide": (6, 30), "tall": (26, 4), "kernel": (6, 5, 3, 3), "low_rank": (12, 8), "vector": (7,)}


def drawn(count: int = 3) -> list[StateDict]:
    """A base and experts; in one matrix each expert has learnt one direction."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    base = {key: normal(*shape) for key, shape in SHAPES.items()}
    experts = [{key: x + 0.1 * normal(*x.shape) for key, x in base.items()} for _ in range(count)]
    for expert in experts:
        expert["low_rank"] = base["low_rank"] + torch.outer(normal(12), normal(8))
    return [base, *experts]


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 1.0])
def test_it_merges_as_the_authors_do_over_the_whole_model(share):
    models = drawn()

    made = m.merge(m.knots(*models, k=share, scale=0.6), options=OPTIONS)

    expected = official(models, share, 0.6)
    for key in SHAPES:
        torch.testing.assert_close(made[key], expected[key], rtol=1e-9, atol=1e-9, msg=key)


def test_by_tensor_it_is_the_authors_merge_of_each_tensor_alone():
    models = drawn()

    made = m.merge(m.knots(*models, k=0.3, trim="tensor"), options=OPTIONS)

    for key in SHAPES:
        alone = (
            official([{key: model[key]} for model in models], 0.3, 1.0)[key] if key != "vector" else made[key]
        )
        torch.testing.assert_close(made[key], alone, rtol=1e-9, atol=1e-9, msg=key)


def test_it_is_exact_enough_in_single_precision():
    models = [{key: x.float() for key, x in model.items()} for model in drawn()]

    made = m.merge(m.knots(*models, k=1.0))

    expected = official([{key: x.double() for key, x in model.items()} for model in models], 1.0, 1.0)
    for key in SHAPES:
        torch.testing.assert_close(made[key].double(), expected[key], rtol=1e-5, atol=1e-5, msg=key)


def test_the_entries_that_are_dropped_are_as_many_as_asked_for_and_the_rest_makes_up_for_them():
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.zeros(40, 4000, dtype=torch.float64)}
    expert = {"w": torch.randn(40, 4000, generator=generator, dtype=torch.float64)}

    made = m.merge(m.knots(base, expert, k=1.0, drop=0.25), options=OPTIONS)["w"]

    u, _, _ = torch.linalg.svd(expert["w"], full_matrices=False)
    before, after = (u.mT @ x for x in (expert["w"], made))
    kept = after.abs() > 1e-6 * before.abs()
    assert kept.double().mean() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(after[kept], before[kept] / 0.75, rtol=1e-6, atol=1e-6)


def test_one_model_without_trimming_is_that_model_in_its_matrices():
    base, expert = drawn(1)

    made = m.merge(m.knots(base, expert, k=1.0), options=OPTIONS)

    for key in SHAPES:
        torch.testing.assert_close(made[key], base[key] if key == "vector" else expert[key], msg=key)


def test_equal_models_are_that_model_and_models_equal_to_the_base_are_the_base():
    base, expert = drawn(1)

    made = m.merge(m.knots(base, expert, expert, k=1.0), options=OPTIONS)
    same = m.merge(m.knots(base, base, base), options=OPTIONS)

    torch.testing.assert_close(made["wide"], expert["wide"])
    assert all(torch.equal(same[key], base[key]) for key in SHAPES)


def test_directions_of_no_size_have_no_coordinates_to_be_counted():
    models = drawn()
    alone = [{"low_rank": model["low_rank"]} for model in models]
    padded = [{"low_rank": torch.cat([x["low_rank"], torch.zeros(30, 8).double()])} for x in alone]

    made, expected = (m.merge(m.knots(*x, k=0.5), options=OPTIONS)["low_rank"] for x in (padded, alone))

    torch.testing.assert_close(made[:12], expected)
    assert not made[12:].any()


def test_stacked_experts_are_merged_one_by_one_where_each_tensor_is_trimmed():
    key = "layers.0.mlp.experts.gate_up_proj"
    generator = torch.Generator().manual_seed(0)
    models = [{key: torch.randn(2, 5, 6, generator=generator)} for _ in range(3)]

    made = m.merge(m.knots(*models, trim="tensor"))[key]

    each = [
        m.merge(m.knots(*({"w": model[key][i]} for model in models), trim="tensor"))["w"] for i in range(2)
    ]
    torch.testing.assert_close(made, torch.stack(each))
    with pytest.raises(m.RecipeError, match="computed expert by expert at the key"):
        m.merge(m.knots(*models))


@pytest.mark.parametrize("trim", ["global", "tensor"])
def test_a_basis_is_found_once_for_all_trips_over_the_data(trim, monkeypatch):
    found = []
    monkeypatch.setattr(shared_basis, "function", lambda *deltas, **given: found.append(len(deltas)) or ())

    m.merge(m.knots(*drawn(), trim=trim), options=OPTIONS)

    assert found == [3] * len(SHAPES)


def test_where_a_basis_cannot_be_kept_it_is_found_again(monkeypatch):
    expected = m.merge(m.knots(*drawn()), options=OPTIONS)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: io.FileIO("/dev/full", "r+"))

    made = m.merge(m.knots(*drawn()), options=OPTIONS)

    assert all(torch.equal(made[key], expected[key]) for key in SHAPES)

"""Tables of positions that an earlier merge made floating point: taken whole, or made anew, and said."""

import pytest
import torch
from torch import Tensor

from mecha_exp import CheckpointError, EngineOptions, add_difference, merge_many, ties, weighted_sum
from mecha_exp.graph.nodes import InMemory, ModelNode

KEY = "cond_stage_model.transformer.text_model.embeddings.position_ids"
OTHER = "cond_stage_model.transformer.text_model.final_layer_norm.weight"
IDS = torch.arange(77).reshape(1, 77)
BROKEN = (IDS.float() * 0.583).half()


def named(name: str, ids: Tensor, seed: int = 0) -> ModelNode:
    tensors = {KEY: ids, OTHER: torch.randn(4, generator=torch.Generator().manual_seed(seed))}
    return ModelNode(InMemory(tensors, name))


def made(recipe, **options) -> tuple[dict[str, Tensor], str]:
    tensors: dict[str, Tensor] = {}
    report = merge_many([(recipe, tensors)], EngineOptions(**options))
    return tensors, "\n".join(report.warnings)


@pytest.mark.parametrize("ids", [IDS.float(), IDS.half(), BROKEN])
@pytest.mark.parametrize("back", [False, True])
def test_integers_are_taken_from_the_file_that_has_them(ids, back):
    a, b = named("a", IDS, 1), named("b", ids, 2)

    merged, said = made(weighted_sum(b, a, alpha=0.5) if back else weighted_sum(a, b, alpha=0.5))

    assert torch.equal(merged[KEY], IDS)
    assert merged[KEY].dtype == torch.int64
    assert "floating point in b; the table of a is taken" in said


@pytest.mark.parametrize("other", [BROKEN, BROKEN.float() * 2, IDS.float()])
def test_without_integers_the_table_is_made_by_its_definition(other):
    merged, said = made(ties(named("a", BROKEN), named("b", other, 2), named("c", BROKEN, 3)))

    assert torch.equal(merged[KEY], IDS)
    assert "made anew, 0 to 76" in said


def test_an_integer_table_is_taken_as_it_is_whatever_it_counts_from():
    merged, _ = made(weighted_sum(named("a", BROKEN), named("b", IDS + 2), alpha=0.5))
    assert torch.equal(merged[KEY], IDS + 2)


def test_whole_numbers_that_are_equal_stay_as_they_are():
    a, b = named("a", IDS.half(), 1), named("b", IDS.half(), 2)

    merged, said = made(add_difference(a, b, named("c", IDS.float()), alpha=0.7))

    assert torch.equal(merged[KEY], IDS.half())
    assert merged[KEY].dtype == torch.float16
    assert said == ""


def test_a_table_of_several_rows_that_is_broken_is_refused():
    a, b = (named(name, BROKEN.reshape(7, 11), seed) for seed, name in enumerate("ab"))
    with pytest.raises(CheckpointError, match="is not one row of them"):
        made(weighted_sum(a, b, alpha=0.5))


def test_all_else_is_merged_as_ever():
    a, b = named("a", IDS, 1), named("b", BROKEN, 2)
    merged, _ = made(weighted_sum(a, b, alpha=0.5))
    whole, _ = made(weighted_sum(named("a", IDS, 1), named("b", IDS, 2), alpha=0.5))
    assert torch.equal(merged[OTHER], whole[OTHER])

"""Stacked experts are not one matrix: the plan says where a method takes them for one."""

import pytest
import torch

import mecha_exp as mx

LAYER = "model.layers.0"
STACKED = {
    f"{LAYER}.mlp.experts.gate_up_proj": (4, 12, 8),
    f"{LAYER}.mlp.experts.down_proj": (4, 8, 6),
    f"{LAYER}.feed_forward.experts.gate_up_proj": (4, 8, 12),
    f"{LAYER}.mlp.experts.gate_up_proj_bias": (4, 12),
    f"{LAYER}.block_sparse_moe.experts.w1": (4, 12, 8),
}
PLAIN = {
    f"{LAYER}.mlp.experts.0.gate_proj.weight": (12, 8),
    f"{LAYER}.mlp.gate.weight": (4, 8),
    f"{LAYER}.mlp.router.weight": (4, 8),
    "conv.weight": (4, 3, 3),
    "pos_embed": (1, 5, 8),
}
WHOLE = {
    "tsv_m": lambda base, *experts: mx.tsv_m(base, *experts),
    "iso_c": lambda base, *experts: mx.iso_c(base, *experts),
    "ties": lambda base, *experts: mx.add_difference_ties(base, *experts, k=0.2),
    "slerp": lambda base, *experts: mx.slerp(base, experts[0]),
}


def warnings(recipe, key: str, shape: tuple[int, ...]) -> list[str]:
    models = [{key: torch.rand(shape, generator=torch.Generator().manual_seed(i))} for i in range(3)]
    with mx.plan([mx.Job(recipe(*models), {})]) as planned:
        return [str(notice) for notice in planned.warnings]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("key", "shape"), STACKED.items())
def test_the_plan_warns_of_experts_that_are_taken_together(name, key, shape):
    (notice,) = warnings(WHOLE[name], key, shape)

    assert notice.startswith("1 keys hold several experts each")
    assert key in notice


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("key", "shape"), PLAIN.items())
def test_other_tensors_are_what_they_are(name, key, shape):
    assert warnings(WHOLE[name], key, shape) == []


@pytest.mark.parametrize(("key", "shape"), STACKED.items())
def test_an_elementwise_method_gives_the_same_for_a_stack(key, shape):
    assert warnings(lambda base, *experts: mx.n_average(base, *experts), key, shape) == []

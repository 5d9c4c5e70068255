"""Reductions of several keys at once give what each key gives alone."""

import pytest
import torch

import mecha_exp as mx
from mecha_exp.engine.ir.layout import compile_program
from mecha_exp.engine.ir.reductions import open_accumulator
from mecha_exp.engine.ir.stacked_keys import of_rows
from mecha_exp.method_api.state_dict import Tile
from mecha_exp.methods.reductions import dot, gram, kth_magnitude, least_kept, mean

MODELS = mx.model("a.safetensors"), mx.model("b.safetensors")
REDUCTIONS = {
    "a sum": dot(*MODELS),
    "several sums": gram(*MODELS),
    "a mean": mean(MODELS[0]),
    "an entry of a rank": kth_magnitude(MODELS[0], k=0.3),
    "a rank above the count": least_kept(MODELS[0], density=0.0, variant="paper"),
}


def rows(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two matrices; some rows are zero, constant, or have NaN among them."""
    generator = torch.Generator().manual_seed(count)
    matrices = [torch.randn(40, count, generator=generator, dtype=dtype) for _ in MODELS]
    for matrix in matrices:
        matrix[3], matrix[5], matrix[7, ::2], matrix[9, 0] = 0, 0.5, 1e-30, torch.nan
    return matrices


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("count", [1, 63, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_nan", [False, True])
def test_a_row_gives_what_a_key_gives(name, count, dtype, with_nan):
    root, matrices = REDUCTIONS[name], rows(count, dtype)
    if not with_nan:
        matrices = [matrix.nan_to_num() for matrix in matrices]
    program = compile_program([root], dtype)
    call = program.calls[root]
    values = dict(zip(program.models, (m.reshape(-1) for m in matrices), strict=False))
    terms = call.partial(values, Tile("all", 0, 40 * count, (40 * count,)), None)
    found = of_rows(root, [t.reshape(40, count) for t in terms], call.hyperparameters, dtype)

    for number in range(40):
        key = Tile("a key", 0, count, (count,))
        alone = dict(zip(program.models, (matrix[number] for matrix in matrices), strict=False))
        accumulator = open_accumulator(root, None, count, count, dtype)
        accumulator.add(0, call.partial(alone, key, None))
        expected = accumulator.finish(call.hyperparameters, dtype)
        assert torch.equal(found[number].nan_to_num(7.0), expected.nan_to_num(7.0))
        assert found[number].isnan().equal(expected.isnan()) and found.dtype is expected.dtype

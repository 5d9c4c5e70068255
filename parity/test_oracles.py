"""Every method against its oracle: what sd-mecha and mergekit gave for the same tensors, in golden files.

`make parity` makes the files anew, in environments of their own, and runs these tests.
"""

import pytest
import torch

from parity.recipes import ORACLES, RECIPES, compared, tolerance
from parity.results import MISTAKES, RESULTS, said_by


def test_every_result_of_an_oracle_is_compared():
    names = {key.split("|")[0] for golden in ORACLES.values() for key in golden}

    assert names == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_oracle_is_met_to_a_billionth_or_to_the_rounding_of_the_dtype(name, dtype):
    for key, made, wanted in compared(name, dtype):
        near = tolerance(name, dtype, wanted)
        torch.testing.assert_close(made, wanted, **near, msg=lambda s, k=key: f"{k}: {s}")


def test_the_saved_table_has_a_row_for_every_comparison_and_every_mistake():
    table = RESULTS.read_text(encoding="utf-8")

    for name in (*RECIPES, *(name for mistakes in MISTAKES.values() for name in mistakes)):
        assert f"| {name} |" in table
    assert "| no |" not in table
    for oracle, known in MISTAKES.items():
        assert known.keys() == said_by(oracle).keys()

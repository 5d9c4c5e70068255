"""Methods without another project as oracle: each against its formula, written out naively in float64."""

import numpy as np
import pytest
import torch
from formulas import CASES, Array

import mecha_exp as m

SHAPES = {"number": (), "vector": (37,), "wide": (13, 21), "tall": (19, 11), "filters": (8, 3, 3, 3)}


def arrays() -> list[dict[str, Array]]:
    """Four models; `ties` holds few different values, and zeros. All values are float32 numbers."""
    generator = np.random.default_rng(17)
    models = []
    for _ in range(4):
        model = {key: generator.standard_normal(shape) for key, shape in SHAPES.items()}
        model["ties"] = generator.choice([0.0, 1.0, -1.0, 2.0, -0.5], size=(6, 7))
        models.append({key: np.asarray(value, np.float32).astype(np.float64) for key, value in model.items()})
    return models


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "accuracy"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
def test_tiles_and_workers_compute_the_formula(name, dtype, accuracy):
    recipe, formula = CASES[name]
    models = arrays()
    nodes = [m.model({key: torch.tensor(x).to(dtype) for key, x in model.items()}) for model in models]

    made = m.merge(recipe(nodes), options=m.EngineOptions(compute_dtype=dtype, workers=3, tile_size=16))

    for key, array in models[0].items():
        expected = formula(key, [model[key] for model in models])
        assert made[key].shape == array.shape
        size = abs(expected).max()
        np.testing.assert_allclose(made[key].numpy(), expected, accuracy, accuracy * size, err_msg=key)

"""What is stored of many tasks: one model for all, and a mask of each, written in one pass."""

import pytest
import torch

import mecha_exp as m
from mecha_exp import EngineOptions, Job, RecipeError, merge_many

OPTIONS = EngineOptions(compute_dtype=torch.float64)
SHAPES = {"matrix": (6, 9), "vector": (11,), "number": ()}


def drawn(count: int = 4) -> list[m.Node]:
    generator = torch.Generator().manual_seed(0)
    base = {key: torch.randn(shape, generator=generator).double() for key, shape in SHAPES.items()}
    experts = [
        {key: x + 0.1 * torch.randn(x.shape, generator=generator).double() for key, x in base.items()}
        for _ in range(count - 1)
    ]
    return [m.model(each) for each in (base, *experts)]


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_a_unified_model_and_masks_of_one_pass_restore_each_task(variant):
    models = drawn()
    jobs = [Job(m.emr_unified(*models, variant=variant), {})]
    jobs += [Job(m.emr_mask(*models, task=task, variant=variant), {}) for task in range(3)]

    merge_many(jobs, OPTIONS)

    unified, *masks = (job.output for job in jobs)
    for task, mask in enumerate(masks):
        restored = m.merge(
            m.apply_mask(models[0], unified, m.model(mask, "param"), scale=0.7), options=OPTIONS
        )
        expected = m.merge(m.emr(*models, task=task, variant=variant, scale=0.7), options=OPTIONS)
        for key in SHAPES:
            torch.testing.assert_close(restored[key], expected[key], rtol=1e-12, atol=1e-12)
        sizes = {float(x) for key in SHAPES for x in mask[key].flatten()}
        assert len(sizes - {0.0}) == 1  # the one scale of the task


def test_tall_masks_are_exact_in_a_byte_and_restore_each_task():
    models = drawn()

    mask = m.merge(m.tall_mask_of(*models, task=1), options=OPTIONS, output_dtype=torch.float8_e4m3fn)

    assert mask["matrix"].dtype == torch.float8_e4m3fn
    assert {float(x) for x in mask["matrix"].float().flatten()} == {0.0, 1.0}
    restored = m.merge(
        m.apply_mask(models[0], m.task_arithmetic(*models), m.model(mask, "param")), options=OPTIONS
    )
    expected = m.merge(m.tall_mask(*models, task=1), options=OPTIONS)
    for key in SHAPES:
        torch.testing.assert_close(restored[key], expected[key], rtol=1e-12, atol=1e-12)


def test_a_task_equal_to_the_base_has_an_empty_mask():
    base, expert, other, _ = drawn()

    mask = m.merge(m.emr_mask(base, base, expert, other, task=0), options=OPTIONS)

    assert not any(mask[key].any() for key in SHAPES)


@pytest.mark.parametrize("method", [m.emr_mask, m.tall_mask_of])
def test_a_task_that_is_not_there_is_an_error(method):
    with pytest.raises(RecipeError, match="task: 3 is too high for 3 models: the first one is 0"):
        m.merge(method(*drawn(), task=3))

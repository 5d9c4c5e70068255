"""Where the uncertainty of a score comes from."""

import numpy as np
import pytest

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, as_json, conclude, sentence
from mecha_exp.verdict.panel import Panel
from mecha_exp.verdict.sources import variance_sources


def panel(values: np.ndarray, labels: list[str]) -> Panel:
    """The outcomes of one setting's replicates, [replicates, examples]."""
    return Panel.of(candidates(values, labels), "s")


def candidates(values: np.ndarray, labels: list[str]) -> list[Candidate]:
    rows = zip(values, labels, strict=True)
    return [Candidate("p", outcomes={"s": Outcomes({"t": row})}, replicate=label) for row, label in rows]


def test_one_model_varies_with_its_examples_alone():
    shares = variance_sources(panel(np.random.default_rng(0).normal(size=(1, 50)), [""]), 0)

    assert shares == {"examples": pytest.approx(1.0)}


def test_examples_and_seeds_share_the_variance_as_they_were_drawn():
    random, examples, seeds = np.random.default_rng(0), 400, 30
    values = random.normal(size=examples) * 2 + random.normal(size=(seeds, 1)) * 0.3

    shares = variance_sources(panel(values, [f"seed={i}" for i in range(seeds)]), 0)

    of_examples, of_seeds = 4 / examples, 0.09 / seeds
    assert shares["examples"] == pytest.approx(of_examples / (of_examples + of_seeds), abs=0.08)
    assert sum(shares.values()) == pytest.approx(1)


def test_seeds_and_experts_are_told_apart():
    random = np.random.default_rng(1)
    labels = [f"seed={s},experts={e}" for s in range(6) for e in range(6)]
    of_experts = np.repeat(random.normal(size=6)[None], 6, axis=0).reshape(-1, 1)
    values = random.normal(size=300) * 0.01 + of_experts

    shares = variance_sources(panel(values, labels), 0)

    assert shares["experts"] > 0.95
    assert shares["seed"] < 0.01


def test_equal_outcomes_vary_with_nothing():
    assert variance_sources(panel(np.ones((3, 9)), ["a", "b", "c"]), 0) == {}


def test_the_verdict_says_where_its_interval_comes_from():
    values = (np.random.default_rng(2).random((6, 200)) < 0.7).astype(float)
    verdict = conclude(candidates(values, [f"seed={i}" for i in range(6)]), metric="accuracy", splits=("s",))

    variance = as_json(verdict)["selected"]["variance"]
    assert list(variance) == ["examples", "seed"]
    assert f"variance: {100 * variance['examples']:.0f} % from examples, " in sentence(verdict)

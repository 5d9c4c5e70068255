"""A sweep as a reader finds it after a long run: many points, metrics of tasks, outcomes by example."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.report import Results
from mecha_exp.report.verdict import verdict_of
from mecha_exp.runs.outcomes import POINT, WHOLE, ModelOutcomes
from mecha_exp.runs.record import Record

RECIPES = ("task_arithmetic", "ties", "dare_ties", "breadcrumbs", "della")


def sweep(points: int, examples: int = 400) -> Results:
    """A sweep of three keys, with eight metrics and outcomes by example."""
    random = np.random.default_rng(0)
    hardness, records, models = random.random(examples), [], []
    for number in range(points):
        recipe, alpha = RECIPES[number % len(RECIPES)], round(0.05 + 1.95 * random.random(), 3)
        density = round(float(10 ** random.uniform(-2, 0)), 4)
        chance = 0.9 - 0.3 * abs(alpha - 0.8) + 0.02 * np.log10(density)
        right = (hardness + 0.1 * random.random(examples) < chance).astype(float)
        metrics = {"accuracy": float(right.mean())}
        metrics |= {f"accuracy/task_{task}": float(right[task::4].mean()) for task in range(4)}
        metrics |= {
            "loss": float(1 - right.mean()),
            "time/merge_seconds": 1.0,
            "weights/relative_change/base": alpha / 9,
        }
        settings = [f"recipe={recipe}", f"alpha={alpha}", f"density={density}"]
        tags = {"signature": f"{number:064x}"}
        records.append(
            Record(",".join(settings), overrides=settings, metrics=metrics, metric="accuracy", tags=tags)
        )
        outcomes = {"accuracy": {WHOLE: Outcomes({"all": right})}}
        models.append(ModelOutcomes(POINT, number, records[-1].name, outcomes))
    results = Results(f"{points} points", ["recipe", "alpha", "density"], records)
    return replace(results, verdict=verdict_of(results, models))

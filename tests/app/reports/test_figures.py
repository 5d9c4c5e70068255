"""Figures of scores: intervals, the base and the best input lie within their axes; colours and labels."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.lab.points import LEARNED_KEY, STEP_KEY
from mecha_exp.report import Results
from mecha_exp.report.figures.adaptive import learning_curves
from mecha_exp.report.figures.blocks import block_importance
from mecha_exp.report.figures.curves import curves, dots
from mecha_exp.report.figures.distance import distances
from mecha_exp.report.figures.heat import heat_map
from mecha_exp.report.figures.landscape import search_progress, slices
from mecha_exp.report.figures.parallel import parallel_coordinates
from mecha_exp.report.figures.pareto import pareto_plot
from mecha_exp.report.figures.style import COLOURS, COLOURS_ON_BLACK, apart
from mecha_exp.report.intervals import best_input, of_inputs, of_settings
from mecha_exp.report.verdict import verdict_of
from mecha_exp.report.why.ablation import block_effects, intervals_of_changes
from mecha_exp.runs.outcomes import INPUT, POINT, ModelOutcomes
from mecha_exp.runs.record import Record

INPUTS = {"base": 0.35, "expert": 0.95, "other": 0.05}


def outcomes(share: float, seed: int) -> Outcomes:
    values = np.random.default_rng(seed).random(80) < share
    return Outcomes({"digits": values.astype(float)})


def concluded(keys: tuple[str, ...], settings: list[dict[str, object]], **more: object) -> Results:
    """A sweep of points with outcomes, whose base and whose best input lie far off the points."""
    inputs = {name: outcomes(share, seed) for seed, (name, share) in enumerate(INPUTS.items())}
    records, models = [], []
    for number, values in enumerate(settings):
        measured = outcomes(0.62 + 0.01 * number, 10 + number)
        overrides = [f"{key}={value}" for key, value in values.items()]
        record = Record(",".join(overrides) or "whole", overrides=overrides, metric="accuracy", base="base")
        record.metrics = measured.means("accuracy") | {"weights/relative_change/base": 0.1 * number}
        record.metrics["loss"] = 1.0 - 0.1 * number
        record.directions = {"accuracy": "maximize", "loss": "minimize"}
        record.references = {name: of.means("accuracy") for name, of in inputs.items()}
        records.append(record)
        models.append(ModelOutcomes(POINT, number, record.name, {"accuracy": {"all": measured}}))
    for name, measured in inputs.items():
        models.append(ModelOutcomes(INPUT, None, name, {"accuracy": {"all": measured}}))
    results = Results("t", keys, records, **more)  # type: ignore[arg-type]
    changes = intervals_of_changes(results, models)
    return replace(results, verdict=verdict_of(results, models), changes=changes)


GRID = [{"a": a, "k": k} for a in (0.1, 0.2, 0.3) for k in (0.4, 0.5)]
CURVE = concluded(("a",), [{"a": a} for a in (0.1, 0.2, 0.3)])
DRAWN = {
    "curves": (curves, CURVE),
    "two lines": (curves, concluded(("a", "k"), GRID)),
    "dots": (dots, concluded(("recipe",), [{"recipe": name} for name in ("ties", "slerp", "dare")])),
    "distance": (distances, CURVE),
    "slices": (slices, concluded(("a", "k"), GRID, mode="search")),
    "search": (search_progress, concluded(("a", "k"), GRID, mode="search")),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_axis_contains_every_interval_the_base_and_the_best_input(name: str):
    draw, results = DRAWN[name]

    figure = draw(results)

    axes = figure.axes[0]
    low, high = axes.get_xlim() if name == "dots" else axes.get_ylim()
    inputs = of_inputs(results)
    assert best_input(results) == "expert"
    for estimate in (*of_settings(results).values(), inputs["base"], inputs["expert"]):
        assert low <= estimate.bounds[0] < estimate.bounds[1] <= high
    named = {text.get_text() for text in axes.texts}
    assert {"base", "expert"} <= named or name == "slices"


@pytest.mark.parametrize("name", DRAWN)
def test_every_setting_has_its_whisker(name: str):
    draw, results = DRAWN[name]

    axes = draw(results).axes[0]

    place = 0 if name == "dots" else 1
    whiskers = [segment[:, place] for group in axes.collections for segment in segments(group)]
    for estimate in of_settings(results).values():
        assert any(np.allclose(sorted(whisker), estimate.bounds) for whisker in whiskers)


def segments(group: object) -> list[np.ndarray]:
    return [np.asarray(s) for s in group.get_segments()] if hasattr(group, "get_segments") else []


def test_the_title_says_over_what_the_intervals_are():
    assert "95 % intervals over examples" in curves(CURVE).axes[0].get_title()
    seeds = concluded(("a", "seed"), [{"a": a, "seed": s} for a in (0.1, 0.2) for s in (1, 2)])
    assert "95 % intervals over examples and seeds" in curves(seeds).axes[0].get_title()


def test_a_map_has_the_interval_of_each_cell_and_of_the_base():
    results = concluded(("a", "k"), GRID)

    figure = heat_map(results)

    texts = [text.get_text() for text in figure.axes[0].texts]
    assert sum("–" in text for text in texts) == len(GRID)
    assert "95 % interval about ±" in figure.axes[0].get_title()
    assert "base 0." in figure.axes[0].get_title() and "expert 0." in figure.axes[0].get_title()


def test_parallel_lines_end_on_an_axis_with_intervals_and_inputs():
    settings = [{"a": a, "k": k, "m": m} for a in (1, 2) for k in (1, 2) for m in ("x", "y")]

    axes = parallel_coordinates(concluded(("a", "k", "m"), settings)).axes[0]

    assert {"base", "expert"} <= {text.get_text() for text in axes.texts}
    assert sum(len(line.get_xdata()) == 2 and line.get_xdata()[0] == 3.02 for line in axes.lines) == 8


def test_two_metrics_have_whiskers_and_the_inputs():
    axes = pareto_plot(CURVE).axes[0]

    assert len(axes.containers) >= 1
    assert "crosses: inputs" in axes.get_title()


def test_what_was_not_learned_has_a_band_beside_the_learned_weights(tmp_path: Path):
    (tmp_path / "learning.csv").write_text("learned,step,loss\nentropy,0,1.0\nentropy,1,0.9\n")
    learned = [{LEARNED_KEY: "entropy", STEP_KEY: step} for step in (1, 2)]
    results = concluded((LEARNED_KEY, STEP_KEY), [{LEARNED_KEY: "nothing", STEP_KEY: 0}, *learned])

    right = learning_curves(results, tmp_path).axes[1]

    low, high = right.get_ylim()
    for estimate in (*of_settings(results).values(), of_inputs(results)["base"]):
        assert low <= estimate.bounds[0] < estimate.bounds[1] <= high


def test_the_change_of_a_block_has_a_paired_interval_over_the_examples():
    settings = [{}, {"block": "IN"}, {"block": "OUT"}]
    results = concluded(("block",), settings, mode="leave_one_block_out")

    effects = block_effects(results)

    assert set(results.changes) == {"IN", "OUT"}
    for block, estimate in effects.items():
        low, high = results.changes[block]
        assert low < estimate.mean < high and estimate.bounds == (low, high)
    assert "95 % intervals over examples" in block_importance(results).axes[0].get_title()


def test_a_block_of_equal_outcomes_changes_nothing_that_could_be_told():
    results = concluded(("block",), [{}, {"block": "IN"}], mode="only_one_block")
    same = outcomes(0.6, 3)
    models = [
        ModelOutcomes(POINT, n, record.name, {"accuracy": {"all": same}})
        for n, record in enumerate(results.records)
    ]

    ((low, high),) = intervals_of_changes(results, models).values()

    assert low < 0 < high


def test_names_lie_on_their_lines_and_close_ones_a_gap_apart():
    assert apart([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    moved = apart([0.50, 0.505, 0.51, 0.9], 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(moved))
    assert moved[3] == 0.9 and np.isclose(np.mean(moved[:3]), 0.505)

    axes = curves(CURVE).axes[0]

    places = {text.get_text(): text for text in axes.texts if text.get_text() in INPUTS}
    for name, text in places.items():
        assert text.xy[1] == of_inputs(CURVE)[name].mean
        assert abs(text.xyann[1]) < 1e-6


# Machado et al. 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency", severity 1.
VISION = {
    "all cones": np.eye(3),
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]
    ],
}  # fmt: skip
TO_XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.072175],
    [0.0193339, 0.119192, 0.9503041],
]


def lab(colour: str, vision: str) -> np.ndarray:
    """A colour in CIE L*a*b* (D65), as it is seen."""
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(VISION[vision] @ linear, 0, 1) / np.array([0.95047, 1, 1.08883])
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [COLOURS, COLOURS_ON_BLACK], ids=["on white", "on black"])
def test_nine_colours_can_be_told_apart(colours: tuple[str, ...], vision: str):
    seen = [lab(colour, vision) for colour in colours]

    assert len(set(colours)) == 9
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 15

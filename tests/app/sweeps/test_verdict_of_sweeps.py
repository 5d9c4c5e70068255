"""The verdict reaches the user: on the terminal, in `verdict.json`, on the page, and by the verbs."""

import html
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sweep_folders import sweep_of

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.report import conclusion as conclusions
from mecha_exp.report.intervals import intervals
from mecha_exp.report.results import Results
from mecha_exp.report.table import terminal_tables
from mecha_exp.report.verdict import conclusion, footnotes, verdict_of, write_verdict
from mecha_exp.report.why.effects import reasons_of
from mecha_exp.runs.outcomes import INPUT, POINT, ModelOutcomes
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.verdict import sentence

SPLITS = ("validation", "test")
FIELDS = {
    "metric",
    "direction",
    "selected_on",
    "reported_on",
    "candidates",
    "selected",
    "comparisons",
    "normalised",
    "detectable",
}


def hits(share: float, count: int = 300, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).random(count) < share).astype(float)


def point(number: int, values: dict[str, np.ndarray], **settings: object) -> tuple[Record, ModelOutcomes]:
    """A record with its outcomes, by split."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    metrics = {
        ("" if s == "validation" else f"{s}/") + "accuracy": float(v.mean()) for s, v in values.items()
    }
    record = Record(",".join(overrides), overrides=overrides, metrics=metrics, metric="accuracy")
    record.split, record.report_split, record.base = *SPLITS, "base"
    record.parameters = {"method": "ties"}
    outcomes = {split: Outcomes({"digits": array}) for split, array in values.items()}
    return record, ModelOutcomes(POINT, number, record.name, {"accuracy": outcomes})


def sweep(*points: tuple[Record, ModelOutcomes], keys: tuple[str, ...] = ("alpha",)) -> Results:
    results = Results("t", keys, [record for record, _ in points])
    base = {split: Outcomes({"digits": hits(0.6, seed=9)}) for split in SPLITS}
    models = [*(model for _, model in points), ModelOutcomes(INPUT, None, "base", {"accuracy": base})]
    return replace(results, verdict=verdict_of(results, models))


def both(share: float, seed: int = 0, count: int = 300) -> dict[str, np.ndarray]:
    return {split: hits(share, count, seed + i) for i, split in enumerate(SPLITS)}


def test_a_duplicated_method_is_not_distinguishable_from_itself():
    same = {"validation": hits(0.8)}
    results = sweep(point(0, both(0.8), recipe="ties"), point(1, same, recipe="twin"), keys=("recipe",))

    assert results.verdict is not None
    (twin,) = [c for c in results.verdict.comparisons if c.against == "recipe=ties"]
    assert (twin.difference.value, twin.p_holm, twin.distinguishable) == (0, 1, False)
    assert results.verdict.tied == ("recipe=twin",)


def test_a_worse_point_is_told_apart_and_only_ties_are_marked():
    results = sweep(
        point(0, both(0.9), alpha=1),
        point(1, {"validation": hits(0.88)}, alpha=2),
        point(2, {"validation": hits(0.3)}, alpha=3),
    )

    console = Console(width=100, file=io.StringIO())
    with console.capture() as shown:
        console.print(*terminal_tables(results, 100), sep="\n")
    lines = {line.split()[0]: line for line in shown.get().splitlines() if line.strip()}
    assert "*" in lines["1"] and "~" in lines["2"]
    assert "~" not in lines["3"] and "*" not in lines["3"]
    assert "[" in lines["3"]
    assert "cannot tell it from the best" in lines["~"]
    assert "over examples" in lines["[low,"]


def test_settings_that_differ_in_the_last_of_many_digits_are_two_settings():
    alphas = ("0.50000001", "0.50000002", "0.7294299")

    results = sweep(*(point(i, both(0.9 - i / 10, i), alpha=alpha) for i, alpha in enumerate(alphas)))

    assert results.verdict is not None
    assert results.verdict.selected is not None
    assert results.verdict.selected.point == "alpha=0.50000001"
    others = {comparison.point for comparison in results.verdict.comparisons}
    assert others >= {"alpha=0.50000002", "alpha=0.7294299"}
    assert [results.cell(setting, "alpha") for setting in results.ranked] == list(alphas)
    assert [setting.name for setting in results.ranked] == [record.name for record in results.records]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"validation": hits(0.8, 200)},
            "has 200 examples of the task 'digits', not 300",
        ),
        ({"validation": np.full(300, np.nan)}, "has 300 outcomes that are not finite"),
        ({"test": hits(0.8)}, "has no outcomes on the split 'validation'"),
    ],
)
def test_outcomes_that_cannot_be_compared_are_a_sentence_and_the_rest_stands(tmp_path, second, message):
    points = [point(0, both(0.9), alpha=1), point(1, both(0.5, 5), alpha=2), point(2, second, alpha=3)]
    results = sweep(*points)

    said = " ".join(conclusion(results))

    assert message in said and "'alpha=3'" in said
    assert "'alpha=1' has accuracy" in said
    assert terminal_tables(results, 100)
    assert write_verdict(results, tmp_path / "verdict.json")
    assert json.loads((tmp_path / "verdict.json").read_text())["selected"]["point"] == "alpha=1"


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([point(0, both(0.9), alpha=1)], "One candidate: nothing was chosen"),
        ([point(n, both(0.9, count=1), alpha=n) for n in (1, 2)], "One example on 'test'"),
        ([point(n, both(1.0), alpha=n) for n in (1, 2)], "All 2 candidates have equal outcomes"),
        (
            [point(n, {"validation": hits(0.8, seed=n)}, alpha=n) for n in (1, 2)],
            "Chosen and reported on the same",
        ),
    ],
    ids=["one point", "one example", "all equal", "a split is missing"],
)
def test_what_limits_a_verdict_is_a_sentence(points, message):
    points = [point(n, values_of(model), alpha=n) for n, (_, model) in enumerate(points)]

    results = sweep(*points)

    assert any(message in line for line in conclusion(results))
    assert terminal_tables(results, 100)


def values_of(model: ModelOutcomes) -> dict[str, np.ndarray]:
    return {split: outcomes.values["digits"] for split, outcomes in model.by_metric["accuracy"].items()}


def test_one_number_a_point_says_that_nothing_tells_about_chance():
    records = [point(n, both(share), alpha=n)[0] for n, share in enumerate((0.5, 0.9))]
    results = Results("t", ["alpha"], records)

    verdict = verdict_of(results, [])

    assert verdict is not None
    assert sentence(verdict).endswith(
        "one number a point: nothing here tells whether differences are chance."
    )
    assert verdict.selected is not None and verdict.selected.point == "alpha=1"
    assert verdict.comparisons == ()


def test_seeds_are_replicates_and_the_footnote_says_what_the_interval_covers():
    points = [
        point(3 * a + s, both(0.6 + a / 10, seed=10 * s), alpha=a, seed=s) for a in (0, 1) for s in (0, 1, 2)
    ]
    results = sweep(*points, keys=("alpha", "seed"))

    assert results.verdict is not None and results.verdict.selected is not None
    assert results.verdict.selected.replicates == 3
    assert ("alpha=1", "test/accuracy") in intervals(results)
    (said,) = footnotes(results, has_intervals=True, has_spreads=False)[-1:]
    assert said == "[low, high] 95 % interval over examples and seeds"
    (spread,) = footnotes(Results("t", [], []), has_intervals=False, has_spreads=True)
    assert "over seeds alone" in spread and "examples is not in it" in spread


@pytest.mark.usefixtures("figures")
def test_a_sweep_of_the_demo_leaves_its_verdict(app: Callable, folder: Path):
    outcome = app("recipe=task_arithmetic,ties", "alpha=0.3,0.9", "output=none", "-m")

    assert outcome.status == 0, outcome.err
    written = json.loads((sweep_of(folder) / "verdict.json").read_text())
    assert written.keys() >= FIELDS
    assert (written["selected_on"], written["reported_on"], written["candidates"]) == (
        "validation",
        "test",
        4,
    )
    fields = {"recipe", "point", "estimate", "ci95", "covers", "fresh", "variance"}
    assert written["selected"].keys() == fields
    low, high = written["selected"]["ci95"]
    assert low < written["selected"]["estimate"] < high
    assert written["selected"]["recipe"] in ("task_arithmetic", "ties")
    compared_with = {written["selected"]["point"], "base", written["best_input"]}
    assert {c["against"] for c in written["comparisons"]} == compared_with
    assert written["normalised"]["experts"] == {t: f"expert_{t}" for t in ("0_3", "4_6", "7_9")}
    assert written["sentence"].startswith(f"'{written['selected']['point']}' has accuracy")
    shown = " ".join(outcome.out.split())
    assert written["sentence"] in shown
    assert "the verdict" in outcome.out
    page = (sweep_of(folder) / "report.html").read_text()
    assert re.search(
        r"Best: <strong>\S+</strong> with accuracy <strong>0\.\d+ \[0\.\d+, 0\.\d+\]</strong>", page
    )

    table = app("table")
    assert written["sentence"] in " ".join(table.out.split())
    assert json.loads(app("table", "--json").out)["verdict"] == written
    latex, markdown = app("table", "--latex").out, app("table", "--markdown").out
    assert latex.startswith(r"\begin{table}") and r"\textbf{" in latex and "Task arithmetic" in latex
    assert markdown.startswith("| Method | 0_3 | 4_6 | 7_9 | accuracy |") and "**" in markdown
    page = (sweep_of(folder) / "report.html").read_text()
    head, _, rest = page.partition("<h2>Results</h2>")
    assert html.escape(written["sentence"], quote=True).replace("&#x27;", "&#39;") in head
    assert "data:image/png;base64," in head and '<table id="tasks">' in head
    assert '<table id="results">' in rest and "cross-validated" in rest
    assert (sweep_of(folder) / "sweep-forest.png").read_bytes().startswith(b"\x89PNG")

    why = json.loads(app("why", "--json").out)
    assert sum([*why["effects"]["main"].values(), why["effects"]["pairs"][0]["share"]]) == pytest.approx(1)
    assert sum(why["variance_shares"].values()) == pytest.approx(1)
    assert why["variance_shares"]["example"] > why["variance_shares"]["method"]
    said = app("why").out
    assert "recipe and alpha" in said and "hyperparameters" in said and "share of the variance" in said


def test_effects_of_a_grid_are_exact_and_drawn_points_are_told_from_it():
    cells = [(a, b, {"validation": np.array([a + 2 * b + a * b])}) for a in (0, 1) for b in (0, 1)]
    records = [point(0, value, a=a, b=b)[0] for a, b, value in cells]

    grid = reasons_of(Results("t", ["a", "b"], records), [])

    assert grid.effects is not None and grid.importances is None
    variances = {"a": 0.75**2, "b": 1.25**2, "both": 0.25**2}
    total = sum(variances.values())
    assert grid.effects.main == pytest.approx({key: variances[key] / total for key in "ab"})
    assert grid.effects.pairs == pytest.approx({("a", "b"): variances["both"] / total})
    assert "Shares of variance need an outcome for each example" in grid.notes[-1]

    drawn = reasons_of(Results("t", ["a", "b"], records[:3]), [])
    assert drawn.effects is None
    assert drawn.notes[0].startswith("No key can be told from chance")
    assert drawn.notes[1].startswith("Exact effects need a full grid: ")
    assert min(drawn.chance.values()) > 0.05 and drawn.importances is not None


def test_one_point_has_no_reasons():
    results = Results("t", ["alpha"], [point(0, both(0.5), alpha=1)[0]])

    with pytest.raises(ConfigError, match="needs two points with different settings and a finite metric"):
        reasons_of(results, [])


@pytest.mark.parametrize("form", ["--latex", "--markdown"])
def test_a_paper_table_by_other_keys_is_refused(app: Callable, folder: Path, form: str):
    app("alpha=0.3,0.9", "output=none", "evaluator=none", "-m")

    assert "needs a verdict, and no evaluator says which points are better" in app("table", form).err
    refused = app("table", form, "--by", "alpha").err
    assert "--latex and --markdown show the best setting of each method" in refused


@pytest.mark.usefixtures("figures")
def test_outcomes_that_are_damaged_are_a_sentence_beside_the_table(app: Callable, folder: Path):
    app("alpha=0.3,0.9", "output=none", "-m")
    (sweep_of(folder) / "outcomes.parquet").write_bytes(b"PAR1 and no more")

    outcome = app("table")

    assert outcome.status == 0
    assert "Nothing is concluded:" in outcome.out and "cannot be read as outcomes" in " ".join(
        outcome.out.split()
    )
    assert "accuracy" in outcome.out and "0.9" in outcome.out


@pytest.mark.usefixtures("figures")
def test_the_table_of_a_large_sweep_that_runs_waits_for_no_outcomes(app: Callable, folder: Path, monkeypatch):
    app("alpha=0.3,0.9", "output=none", "-m")
    sweep = Sweep.load(sweep_of(folder))
    sweep.complete = False
    sweep.save(sweep_of(folder))
    monkeypatch.setattr(conclusions, "MOST_READ", 1)
    assert "Nothing is concluded" not in app("table").out  # it has ended, with a point that failed
    (sweep_of(folder) / "outcomes.parquet").unlink()

    outcome = app("table")

    assert outcome.status == 0
    assert "Nothing is concluded: the outcomes of 2 points lie in files of their own" in outcome.out
    assert "accuracy" in outcome.out and "0.9" in outcome.out
    monkeypatch.setattr(conclusions, "MOST_READ", 2)
    assert "Nothing is concluded" not in app("table").out


@pytest.mark.usefixtures("figures")
def test_a_sweep_that_goes_on_over_damaged_outcomes_shows_its_table(app: Callable, folder: Path):
    command = ("alpha=0.3,0.9", "output=none", "-m")
    app(*command)
    (sweep_of(folder) / "0/outcomes.parquet").write_bytes(b"PAR1 and no more")
    for name in ("sweep.csv", "outcomes.parquet"):
        (sweep_of(folder) / name).unlink()
    sweep = Sweep.load(sweep_of(folder))
    sweep.complete = False
    sweep.save(sweep_of(folder))

    outcome = app(*command)

    assert "cannot be read as outcomes" in " ".join(outcome.err.split())
    assert (sweep_of(folder) / "sweep.csv").exists() and "0.9" in outcome.out
    assert outcome.status == 1


@pytest.mark.usefixtures("figures")
def test_the_files_of_a_complete_sweep_are_made_again(app: Callable, folder: Path):
    command = ("alpha=0.3,0.9", "output=none", "-m")
    app(*command)
    for name in ("sweep.csv", "outcomes.parquet"):
        (sweep_of(folder) / name).unlink()

    app(*command)

    assert all((sweep_of(folder) / name).exists() for name in ("sweep.csv", "outcomes.parquet"))

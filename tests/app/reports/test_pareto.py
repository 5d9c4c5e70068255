"""Several metrics: the Pareto front in the CSV, in the table, on the page and as a figure."""

from pathlib import Path

import pytest

from mecha_exp.report import Results
from mecha_exp.report.export import columns
from mecha_exp.report.figures import draw_figures
from mecha_exp.report.pareto import front, objectives
from mecha_exp.report.table import rows, terminal_tables
from mecha_exp.runs.record import Record

BOTH = {"accuracy": "maximize", "size/bytes": "minimize"}
MEASURED = {"a": (0.9, 50.0), "b": (0.8, 30.0), "c": (0.8, 40.0), "d": (0.95, 60.0), "e": (float("nan"), 1.0)}


def results(directions: dict[str, str] = BOTH) -> Results:
    records = [
        Record(
            f"recipe={name}",
            overrides=[f"recipe={name}"],
            metrics=dict(zip(BOTH, values, strict=True)),
            metric="accuracy",
            directions=directions,
        )
        for name, values in MEASURED.items()
    ]
    return Results("t", ["recipe"], records)


def test_what_nothing_beats_in_all_metrics_is_on_the_front():
    assert front(results()) == ["recipe=a", "recipe=b", "recipe=d"]


def test_one_metric_has_no_front():
    alone = results({"accuracy": "maximize"})

    assert objectives(alone) == {} and front(alone) == []
    assert "pareto" not in columns(alone)
    assert not any(row.on_front for row in rows(alone, ["accuracy"]))


def test_the_csv_and_the_table_mark_the_front():
    marked = results()

    assert columns(marked)["pareto"] == [True, True, False, True, False]
    marks = {row.label[0]: row.mark for row in rows(marked, ["accuracy"])}
    assert {name: mark.lstrip("~") for name, mark in marks.items()} == {
        "a": "^",
        "b": "^",
        "c": "",
        "d": "*^",
        "e": "",
    }
    said = [str(part) for part in terminal_tables(marked, 80)[1:]]
    assert (
        "^ on the Pareto front of accuracy (more is better), size/bytes (less is better): no other setting "
        "is as good in all and better in one"
    ) in said


def test_replicates_are_on_the_front_by_their_mean():
    values = {("a", 1): (0.9, 9.0), ("a", 2): (0.1, 1.0), ("b", 1): (0.6, 4.0), ("b", 2): (0.6, 4.0)}
    records = [
        Record(
            f"{name}{seed}",
            overrides=[f"recipe={name}", f"seed={seed}"],
            metrics=dict(zip(BOTH, pair, strict=True)),
            metric="accuracy",
            directions=BOTH,
        )
        for (name, seed), pair in values.items()
    ]

    assert columns(Results("t", ["recipe", "seed"], records))["pareto"] == [False, False, True, True]


@pytest.mark.parametrize("third", [{}, {"loss": "minimize"}])
def test_the_front_is_drawn(tmp_path: Path, third: dict[str, str]):
    swept = results({**BOTH, **third})
    for record in swept.records:
        record.metrics |= dict.fromkeys(third, 1.0)

    pictures = draw_figures(swept, tmp_path)

    (drawn,) = [picture for picture in pictures if "pareto" in picture.path.name]
    assert drawn.path.stat().st_size > 5000

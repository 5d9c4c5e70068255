"""The table, the CSV file and the figure of a sweep, from records alone."""

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from mecha_exp.app.figures import draw_sweep
from mecha_exp.app.record import FAILED, Record, load_all
from mecha_exp.app.results import Results
from mecha_exp.errors import ConfigError


def record(accuracy: float = 0.5, status: str = "FINISHED", **settings: object) -> Record:
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return Record(
        ",".join(overrides),
        status,
        error="it broke" if status == FAILED else None,
        overrides=overrides,
        metrics={} if status == FAILED else {"accuracy": accuracy, "time/merge_seconds": 1.0},
        metric=None if status == FAILED else "accuracy",
        references={"base": {"accuracy": 0.4}},
    )


def shown(results: Results) -> str:
    console = Console(width=100, no_color=True, record=True, file=io.StringIO())
    console.print(results.table())
    return console.export_text()


CURVE = Results("curve", ["alpha"], [record(0.6, alpha=0.3), record(0.8, alpha=0.5), record(0.7, alpha=0.7)])


def test_the_table_is_sorted_by_the_main_metric_with_the_best_point_marked():
    lines = [line.split() for line in shown(CURVE).splitlines()]

    rows = [line for line in lines if line and line[0] in ("0.3", "0.5", "0.7")]
    assert [row[0] for row in rows] == ["0.5", "0.7", "0.3"]
    assert rows[0][1:] == ["0.8", "*"]


def test_less_is_better_where_the_evaluator_says_so():
    for item in CURVE.records:
        item.direction = "minimize"

    assert CURVE.best is CURVE.records[0]

    for item in CURVE.records:
        item.direction = "maximize"


def test_a_failed_point_stands_last_and_a_nan_is_not_the_best():
    results = Results(
        "t", ["alpha"], [record(status=FAILED, alpha=1), record(float("nan"), alpha=2), record(0.1, alpha=3)]
    )

    assert results.best is results.records[2]
    assert "failed" in shown(results)


def test_the_inputs_stand_below_the_points():
    assert "base" in shown(CURVE).splitlines()[-2]


def test_the_csv_file_has_a_row_for_each_point_and_each_input(tmp_path: Path):
    CURVE.write_csv(tmp_path / "sweep.csv")

    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["alpha"] for row in rows] == ["0.3", "0.5", "0.7", ""]
    assert rows[-1]["status"] == "REFERENCE"
    assert rows[1]["accuracy"] == "0.8"


@pytest.mark.parametrize(
    ("swept", "settings"),
    [
        (["alpha"], [{"alpha": 0.1}, {"alpha": 0.2}]),
        (["recipe", "alpha"], [{"recipe": r, "alpha": a} for r in ("ties", "slerp") for a in (1, 2)]),
        (["alpha", "k"], [{"alpha": a, "k": k} for a in (1, 2) for k in (0.1, 0.2)]),
        (["recipe"], [{"recipe": "ties"}, {"recipe": "slerp"}]),
    ],
    ids=["curve", "curves", "heat map", "bars"],
)
def test_every_kind_of_sweep_has_a_figure(tmp_path: Path, swept, settings):
    results = Results("t", swept, [record(0.1 * i, **s) for i, s in enumerate(settings)])

    assert draw_sweep(results, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_without_a_finished_point_has_no_figure(tmp_path: Path):
    results = Results("t", ["alpha"], [record(status=FAILED, alpha=1)])

    assert not draw_sweep(results, tmp_path / "sweep.png")
    assert not (tmp_path / "sweep.png").exists()


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path):
    written = record(float("nan"), alpha=0.3)

    written.save(tmp_path / "0")

    (read,) = load_all(tmp_path).values()
    assert read.name == written.name
    assert read.overrides == written.overrides
    assert str(read.metrics["accuracy"]) == "nan"


def test_points_come_in_the_order_of_their_numbers(tmp_path: Path):
    for number in (10, 2, 1):
        record(alpha=number).save(tmp_path / str(number))

    assert [path.name for path in load_all(tmp_path)] == ["1", "2", "10"]


def test_a_damaged_record_says_so(tmp_path: Path):
    (tmp_path / "run.json").write_text("{")

    with pytest.raises(ConfigError, match="is damaged"):
        Record.load(tmp_path)

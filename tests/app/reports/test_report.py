"""The table, the data files, the figures and the page of a sweep, from records alone."""

import csv
import io
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from mecha_exp.errors import ConfigError
from mecha_exp.report import Results, terminal_table, terminal_tables, write_all
from mecha_exp.report.export import write_csv, write_parquet
from mecha_exp.report.figures import draw_figures
from mecha_exp.report.figures.landscape import search_progress
from mecha_exp.report.settings import Estimate
from mecha_exp.report.table import distinct, estimate_text
from mecha_exp.runs.record import FAILED, Record, load_all

COMMAND = ["python", "-m", "mecha_exp", "alpha=0.3,0.5", "-m"]


def record(accuracy: float = 0.5, status: str = "FINISHED", **settings: object) -> Record:
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return Record(
        ",".join(overrides),
        status,
        error="it broke" if status == FAILED else None,
        overrides=overrides,
        metrics={}
        if status == FAILED
        else {"accuracy": accuracy, "time/merge_seconds": 1.0, "weights/relative_change/base": accuracy / 9},
        metric=None if status == FAILED else "accuracy",
        references={"base": {"accuracy": 0.4}},
        units={"accuracy": "fraction"},
    )


def shown(results: Results, width: int = 100) -> str:
    console = Console(width=width, no_color=True, record=True, file=io.StringIO())
    console.print(terminal_table(results, width))
    return console.export_text()


METHODS = Results(
    "methods",
    ["recipe", "alpha"],
    [
        record(accuracy, recipe=recipe, alpha=alpha)
        for recipe, alpha, accuracy in (
            ("ties", 0.3, 0.6), ("ties", 0.5, 0.9), ("slerp", 0.3, 0.7), ("slerp", 0.5, 0.5),
            ("sce", 1, math.nan),
        )
    ],
)  # fmt: skip
MANY = replace(
    METHODS, records=[*METHODS.records, *(record(0.1, recipe="ties", alpha=2 + i) for i in range(10))]
)
CURVE = Results("curve", ["alpha"], [record(0.6, alpha=0.3), record(0.8, alpha=0.5), record(0.7, alpha=0.7)])
SEEDS = Results(
    "seeds", ["alpha", "seed"], [record(a + s / 100, alpha=a, seed=s) for a in (0.3, 0.5) for s in (1, 2, 3)]
)
BLOCKS = Results(
    "blocks",
    ["block"],
    [record(0.8), *(record(0.8 - d, block=f"b{n}") for n, d in enumerate((0.1, -0.05, 0.2)))],
    mode="leave_one_block_out",
)
WEIGHTS = Results("presets", ["blocks"], [record(0.1 * n, blocks=f"p{n}") for n in range(3)])
for number, item in enumerate(WEIGHTS.records):
    item.block_weights = {"alpha": {"IN00": 0.1 * number, "M00": 0.5, "OUT00": 1.0}}


def test_the_table_is_sorted_by_the_main_metric_with_the_best_point_marked():
    lines = [line.split() for line in shown(CURVE).splitlines()]

    rows = [line for line in lines if line and line[0] in ("0.3", "0.5", "0.7")]
    assert [row[0] for row in rows] == ["0.5", "0.7", "0.3"]
    assert rows[0][1:] == ["0.8000", "*"]


def test_a_table_with_many_columns_has_a_line_for_each_row():
    point = record(0.5, recipe="ties")
    point.metrics |= {f"accuracy/task{n}": 0.5 for n in range(9)}
    results = Results("t", ["recipe"], [point], shown=list(point.metrics))

    for width in range(40, 120):
        console = Console(width=width, no_color=True, file=io.StringIO())
        console.print(terminal_tables(results, width)[0])
        lines = [line for line in console.file.getvalue().splitlines() if line.strip()]
        assert [line.split()[:3] for line in lines if "ties" in line] == [["ties", "0.5000", "*"]], width


def test_of_many_settings_of_methods_the_best_of_each_are_shown(tmp_path: Path):
    console = Console(width=100, no_color=True, file=io.StringIO())
    console.print(*terminal_tables(MANY, 100))
    write_all(METHODS, COMMAND, tmp_path)

    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines[0] == ["the", "best", "of", "each", "recipe"]
    assert lines[3:5] == [["ties", "0.5", "0.9000", "*"], ["slerp", "0.3", "0.7000"]]
    assert "all 15 settings: python -m mecha_exp table" in console.file.getvalue()
    (whole,) = [part for part in terminal_tables(MANY, 100, is_whole=True) if isinstance(part, Table)]
    assert whole.row_count == 16  # the input stands below
    page = (tmp_path / "report.html").read_text()
    assert page.index("<h2>The best of each recipe</h2>") < page.index("<h2>Results</h2>")
    with (tmp_path / "sweep.csv").open() as file:
        marked = [row["name"] for row in csv.DictReader(file) if row["best_of_recipe"] == "true"]
    assert marked == ["recipe=ties,alpha=0.5", "recipe=slerp,alpha=0.3"]


def test_less_is_better_where_the_evaluator_says_so():
    records = [record(0.6, alpha=0.3), record(0.8, alpha=0.5)]
    for item in records:
        item.direction = "minimize"

    assert Results("t", ["alpha"], records).best is records[0]


def test_a_failed_point_stands_last_and_a_nan_is_not_the_best():
    results = Results(
        "t", ["alpha"], [record(status=FAILED, alpha=1), record(math.nan, alpha=2), record(0.1, alpha=3)]
    )

    assert results.best is results.records[2]
    text = shown(results)
    assert text.index("0.1000 *") < text.index("nan") < text.index("failed")


def test_the_inputs_stand_below_the_points():
    assert "base" in shown(CURVE).splitlines()[-2]


def test_a_metric_that_a_row_lacks_is_a_dash_in_the_table_and_empty_in_the_data(tmp_path: Path):
    records = [record(0.6, base="a"), record(0.5, base="b")]
    records[0].metrics["extra"] = 7.0
    results = Results("t", ["base"], records, shown=["accuracy", "extra"])

    lines = [line.split() for line in shown(results).splitlines() if line.strip()]
    assert lines[3:] == [["a", "0.6000", "*", "7"], ["b", "0.5000", "–"], ["base", "0.4000", "–"]]
    write_all(results, COMMAND, tmp_path)
    with (tmp_path / "sweep.csv").open() as file:
        assert [row["extra"] for row in csv.DictReader(file)] == ["7.0", "", ""]
    assert '<td class="number">–</td>' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("mode", "heading"), [("leave_one_block_out", "block left out"), ("only_one_block", "only block")]
)
def test_a_block_ablation_says_in_its_table_what_happens_to_the_block(
    tmp_path: Path, mode: str, heading: str
):
    results = replace(BLOCKS, mode=mode)

    lines = shown(results).splitlines()
    assert lines[2].strip().startswith(heading)
    assert sorted(line.split()[0] for line in lines[4:8]) == ["b0", "b1", "b2", "none"]
    write_all(results, COMMAND, tmp_path)
    assert f">{heading}</button>" in (tmp_path / "report.html").read_text()


def test_replicates_are_one_row_with_a_mean_and_an_interval():
    (line,) = [line for line in shown(SEEDS).splitlines() if line.strip().startswith("0.5")]

    assert line.split() == ["0.5", "3", "0.520", "±", "0.025", "*"]
    assert SEEDS.best is SEEDS.records[-1]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
def test_the_interval_is_students(values: list[float]):
    from scipy import stats

    estimate = Estimate.of([*values, math.nan])

    low, high = stats.t.interval(0.95, len(values) - 1, loc=estimate.mean, scale=stats.sem(values) or 1e-300)
    assert estimate.count == len(values)
    assert estimate.half_width == pytest.approx((high - low) / 2, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(0.87654, 0.0123, 3), "0.877 ± 0.012"),
        (Estimate(0.5, 0.0, 3), "0.5000 ± 0"),
        (Estimate(0.86, None, 1, ci95=(0.8, 0.9)), "0.8600 [0.80, 0.90]"),
        (Estimate(1.0, None, 1), "1"),
        (Estimate(1234.5, None, 1), "1234"),
        (Estimate(12345.6, 789.0, 3), "1.235e+04 ± 7.9e+02"),
        (Estimate(0.87654, None, 1), "0.8765"),
        (Estimate(math.nan, None, 0), "–"),
        (Estimate.of([math.nan, math.inf]), "nan"),
    ],
)
def test_an_estimate_has_as_many_digits_as_it_is_sure_of(estimate: Estimate, text: str):
    assert estimate_text(estimate) == text


def test_a_narrow_terminal_shows_fewer_metrics_and_keeps_the_main_one():
    records = [record(0.5, alpha=a) for a in (1, 2)]
    for item in records:
        item.metrics |= {f"a_metric_with_a_long_name_{n}": 1.0 for n in range(6)}

    text = shown(Results("t", ["alpha"], records), width=50)

    assert "accuracy" in text
    assert "long_name_0" in text and "long_name_5" not in text
    assert max(map(len, text.splitlines())) <= 50


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_table_over_many_keys_keeps_the_column_of_the_main_metric(width: int):
    keys = [f"blocks.convolution_{n}" for n in range(7)]
    points = [record(0.5 + n / 10, **{key: f"0.{n}{k}" for k, key in enumerate(keys)}) for n in range(3)]

    lines = shown(Results("search", keys, points), width).splitlines()

    (best,) = [line for line in lines if "*" in line]
    assert "0.7000 *" in best and any("accuracy" in line for line in lines)
    assert max(map(len, lines)) <= width
    hidden = 7 - " ".join(lines).count("blocks.")
    assert hidden == 0 or any("more column" in line for line in lines)
    assert any(line.strip().startswith("base") and "0.4000" in line for line in lines)


def test_long_values_keep_what_tells_them_apart():
    paths = ["[/data/models/first.safetensors]", "[/data/models/second.safetensors]"]

    assert distinct(paths, 24) == ["[/data/models/first…", "[/data/models/second…"]
    assert len(set(distinct(paths, 12))) == 2


def test_the_csv_file_has_a_row_for_each_point_and_each_input(tmp_path: Path):
    write_csv(CURVE, tmp_path / "sweep.csv")

    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["alpha"] for row in rows] == ["0.3", "0.5", "0.7", ""]
    assert rows[-1]["status"] == "REFERENCE"
    assert rows[1]["accuracy"] == "0.8"


def test_pandas_finds_numbers_where_there_are_numbers(tmp_path: Path):
    pandas = pytest.importorskip("pandas")
    points = [record(0.5, alpha=0.5, k=1, vote="true", recipe="ties"), record(status=FAILED, alpha=1, k=2)]
    results = Results("t", ["alpha", "k", "vote", "recipe"], points)

    write_csv(results, tmp_path / "t.csv")
    write_parquet(results, tmp_path / "t.parquet")

    table, text = pandas.read_parquet(tmp_path / "t.parquet"), pandas.read_csv(tmp_path / "t.csv")
    assert table.alpha.dtype == text.alpha.dtype == "float64"
    assert table.accuracy.tolist()[::2] == [0.5, 0.4] and table.accuracy.isna()[1]
    assert table.recipe[0] == "ties" and table.vote[0] is True
    assert table.columns.tolist() == text.columns.tolist()


def test_parquet_keeps_every_bit_and_tells_a_nan_from_nothing(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    points = [record(1 / 3, alpha=0.1, k=2**62), record(math.nan, alpha=1), record(status=FAILED, alpha=2)]
    points[2].error = 'first line\nsecond, "quoted"'

    write_parquet(Results("t", ["alpha", "k"], points), tmp_path / "t.parquet")

    rows = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert (rows[0]["alpha"], rows[0]["k"], rows[0]["accuracy"]) == (0.1, 2**62, 1 / 3)
    assert math.isnan(rows[1]["accuracy"]) and rows[2]["accuracy"] is None and rows[1]["k"] is None
    assert rows[2]["error"] == points[2].error and rows[0]["error"] is None


def test_writing_parquet_needs_no_pandas(tmp_path: Path):
    """To import it takes longer than all else at the end of a sweep."""
    program = (
        "import sys; from pathlib import Path; from mecha_exp.runs.record import Record;"
        "from mecha_exp.report.export import write_parquet; from mecha_exp.report import Results;"
        f"write_parquet(Results('t', [], [Record('a')]), Path({str(tmp_path / 't.parquet')!r}));"
        "sys.exit('pandas' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("results", "names"),
    [
        (CURVE, ["sweep.png", "sweep-distance.png"]),
        (SEEDS, ["sweep.png", "sweep-distance.png"]),
        (
            Results(
                "t", ["recipe", "a"], [record(a, recipe=r, a=a) for r in ("ties", "slerp") for a in (1, 2)]
            ),
            ["sweep.png", "sweep-heat-map.png", "sweep-distance.png"],
        ),
        (
            Results("t", ["a", "k"], [record(a * k, a=a, k=k) for a in (1, 2) for k in (0.01, 1)]),
            ["sweep.png", "sweep-curves.png", "sweep-distance.png"],
        ),
        (
            Results("t", ["a", "k", "m"], [record(a, a=a, k=1 / a, m=f"m{a}") for a in (1, 2, 3)]),
            ["sweep.png", "sweep-distance.png"],
        ),
        (Results("t", ["r"], [record(0.1, r="x"), record(0.2, r="y")]), ["sweep.png", "sweep-distance.png"]),
        (
            Results("t", ["a", "k"], [record(0.1 * n, a=n, k=1 / n) for n in (1, 2, 3)], mode="search"),
            ["sweep.png", "sweep-slices.png", "sweep-heat-map.png", "sweep-curves.png", "sweep-distance.png"],
        ),
        (BLOCKS, ["sweep.png", "sweep-distance.png"]),
        (WEIGHTS, ["sweep.png", "sweep-block-weights.png", "sweep-distance.png"]),
    ],
    ids=["curve", "intervals", "words", "heat map", "parallel", "dots", "search", "blocks", "weights"],
)
def test_every_kind_of_sweep_has_its_figures(tmp_path: Path, results: Results, names: list[str]):
    drawn = [picture.path for picture in draw_figures(results, tmp_path)]

    assert [path.name for path in drawn] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize(
    ("direction", "expected"), [("maximize", [0.3, 0.3, 0.6, 0.6]), ("minimize", [0.3, 0.2, 0.2, 0.1])]
)
def test_a_search_has_a_curve_of_the_best_so_far(direction: str, expected: list[float]):
    trials = [record(value, a=n) for n, value in enumerate((0.3, 0.2, math.nan, 0.6, 0.1))]
    for trial in trials:
        trial.direction = direction

    (axes,) = search_progress(Results("t", ["a"], trials, mode="search")).axes

    assert axes.lines[0].get_ydata() == pytest.approx(expected)
    assert list(axes.lines[0].get_xdata()) == [0, 1, 3, 4]
    assert len(axes.collections[0].get_offsets()) == 4


def test_two_numbers_that_were_drawn_are_points_where_they_lie():
    from mecha_exp.report.figures.heat import heat_map

    draws = Results("latin", ["a", "k"], [record(0.1 * n, a=0.1 * n, k=(7 * n) % 10) for n in range(10)])
    grid = Results("grid", ["a", "k"], [record(a + k, a=a, k=k) for a in (1, 2, 3) for k in (1, 2, 3)])

    drawn, cells = heat_map(draws), heat_map(grid)

    assert drawn is not None and cells is not None
    assert not drawn.axes[0].images and cells.axes[0].images
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert texts == [f"{0.1 * n:.3f}" for n in range(9)] + ["best 0.900"]
    assert {text.get_text() for text in cells.axes[0].texts} == {"2.00", "3.00", "4.00", "5.00", "6.00"}


def test_a_method_without_the_hyperparameter_is_a_level_line_and_a_column_of_its_own(tmp_path: Path):
    from mecha_exp.report.figures.curves import curves
    from mecha_exp.report.figures.heat import heat_map

    tried = [record(a / 2, recipe="ties", alpha=a) for a in (0.5, 1.0, 1.5)]
    results = Results("t", ["recipe", "alpha"], [*tried, record(0.6, recipe="n_average")])

    assert [p.path.name for p in draw_figures(results, tmp_path)][:2] == ["sweep.png", "sweep-heat-map.png"]
    drawn, cells = curves(results), heat_map(results)
    assert drawn is not None and cells is not None
    (level,) = [line for line in drawn.axes[0].lines if line.get_label() == "n_average"]
    assert list(level.get_ydata()) == [0.6, 0.6]
    assert [text.get_text() for text in cells.axes[0].get_xticklabels()] == ["–", "0.5", "1", "1.5"]


def test_parallel_lines_of_points_without_a_number_pass_below_the_numbers():
    from mecha_exp.report.figures.parallel import parallel_coordinates

    tried = [record(0.1 * k, recipe="ties", alpha=1, k=k) for k in (1, 2, 3)]
    results = Results("t", ["recipe", "alpha", "k"], [*tried, record(0.05, recipe="sum", alpha=2)])

    (axes,) = parallel_coordinates(results).axes

    assert sorted({float(line.get_ydata()[2]) for line in axes.lines[:4]}) == pytest.approx([0, 0.2, 0.6, 1])
    assert "–" in [text.get_text() for text in axes.texts]


def test_values_of_points_that_lie_together_do_not_cover_each_other():
    from mecha_exp.report.figures.heat import heat_map

    places = [(0.0, 0.0), (1.0, 1.0), (0.5, 0.50), (0.51, 0.55), (0.2, 0.8)]
    results = Results("latin", ["a", "k"], [record(0.1 * n, a=a, k=k) for n, (a, k) in enumerate(places)])

    drawn = heat_map(results)
    assert drawn is not None
    above = {tuple(text.xy): text.xyann[1] > 0 for text in drawn.axes[0].texts}
    assert above[0.5, 0.5] is False and above[0.51, 0.55] is True


def test_parallel_lines_end_in_their_metric():
    from mecha_exp.report.figures.parallel import parallel_coordinates

    results = Results("t", ["a", "k", "m"], [record(a / 4, a=a, k=1 / a, m=f"m{a}") for a in (1, 2, 3)])

    (axes,) = parallel_coordinates(results).axes

    assert [label.get_text() for label in axes.get_xticklabels()][:3] == ["a", "k", "m"]
    assert axes.get_xticklabels()[3].get_text() == "accuracy\n[fraction]\nmore is better"
    assert [line.get_ydata()[-1] for line in axes.lines[:3]] == [0, 0.5, 1]
    assert axes.get_legend().get_texts()[0].get_text() == "best: a=3,k=0.33333333333333,m=m3 with 0.75"


def test_distances_are_means_over_seeds_with_a_mark_for_each_value():
    from mecha_exp.report.figures.distance import distances

    figure = distances(SEEDS)

    marks = figure.axes[0].get_legend_handles_labels()
    assert marks[1] == ["0.3", "0.5"]
    assert [len(mark.get_offsets()) for mark in marks[0]] == [1, 1]


def test_the_intervals_of_two_lines_do_not_cover_each_other():
    from mecha_exp.report.figures.curves import curves

    points = [record(a + s / 100, a=a, k=k, seed=s) for a in (0.3, 0.5) for k in (1, 2) for s in (1, 2)]

    axes = curves(Results("t", ["a", "k", "seed"], points)).axes[0]

    first, second = ([round(float(x), 4) for x in line[0].get_xdata()] for line in axes.containers)
    assert first[0] < 0.3 < second[0] and second[1] - first[1] < 0.01


def test_a_block_that_hurts_has_another_sign():
    from mecha_exp.report.why.ablation import block_effects

    effects = {block: round(estimate.mean, 3) for block, estimate in block_effects(BLOCKS).items()}

    assert effects == {"b0": 0.1, "b1": -0.05, "b2": 0.2}


def test_a_block_is_compared_with_the_whole_of_its_own_seed():
    from mecha_exp.report.why.ablation import block_effects

    points = [record(0.5 + s, seed=s) for s in (1, 2, 3)]
    points += [record(0.6 + s, seed=s, block="b0") for s in (1, 2, 3)]

    effect = block_effects(Results("t", ["block", "seed"], points, mode="only_one_block"))["b0"]

    assert effect.mean == pytest.approx(0.1)
    assert effect.half_width == pytest.approx(0, abs=1e-12)


def test_the_weight_of_a_block_is_the_mean_over_its_keys(tmp_path: Path):
    import torch
    from safetensors.torch import save_file

    from mecha_exp import weighted_sum
    from mecha_exp.app.recipes.block_weights import block_weights

    path = tmp_path / "a.safetensors"
    save_file({f"layers.{i}.{part}": torch.zeros(2) for i in range(2) for part in ("w", "b")}, path)
    recipe = weighted_sum(str(path), str(path), alpha={"layers.0.w": 1.0, "layers.1": 0.25, "default": 0.5})

    assert block_weights(recipe, [path]) == {"alpha": {"0": 0.75, "1": 0.25}}
    assert block_weights(weighted_sum(str(path), "b.safetensors", alpha=0.5), [path]) == {}


def test_a_sweep_without_a_finished_point_has_no_figure(tmp_path: Path):
    results = Results("t", ["alpha"], [record(status=FAILED, alpha=1)])

    assert not draw_figures(results, tmp_path)


def test_the_page_has_everything_in_it_and_asks_for_nothing(tmp_path: Path):
    results = Results("<b>", ["alpha"], [*CURVE.records, record(status=FAILED, alpha="<i>")])
    results.records[0].tags.update({"version/torch": "9.9", "git/commit": "abc"})
    results.records[0].parameters["input/base"] = "/models/base.safetensors"
    results.records[1].note = "made again: the input base has changed"

    write_all(results, COMMAND, tmp_path)

    page = (tmp_path / "report.html").read_text()
    for words in (
        "&lt;b&gt;",
        "python -m mecha_exp alpha=0.3,0.5 -m",
        "Best: <strong>alpha=0.5</strong> with accuracy <strong>0.8000</strong> (fraction)",
        "data:image/png;base64,",
        "9.9",
        "/models/base.safetensors",
        "it broke",
        "alpha=0.5: made again: the input base has changed",
        "mecha_exp reproduce",
    ):
        assert words in page
    assert "<b>" not in page
    assert "http:" not in page and "https:" not in page and 'src="sweep' not in page


def test_the_page_of_very_many_settings_has_the_best_and_says_so(tmp_path, monkeypatch):
    many = [record(0.5 + n / 1000, alpha=n, k=n % 7) for n in range(30)]
    monkeypatch.setattr("mecha_exp.report.page.html.MOST_SETTINGS", 10)
    monkeypatch.setattr("mecha_exp.report.figures.parallel._MAX_LINES", 10)

    write_all(Results("many", ["alpha", "k", "seed"], many), COMMAND, tmp_path)

    page = (tmp_path / "report.html").read_text()
    assert "The best 10 settings: 20 others are left out here and in the interactive figures." in page
    assert page.count("data-setting=") == 10
    assert "30 points" in page and "Best: <strong>alpha=29,k=1</strong>" in page
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 1 + 30 + 1


def test_without_the_library_the_page_has_its_pictures_and_tables_and_no_charts(tmp_path, monkeypatch):
    monkeypatch.setattr("mecha_exp.report.page.html.plotly_packed", lambda: None)

    write_all(CURVE, COMMAND, tmp_path)

    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 2 and page.count("data-setting=") == 3
    assert "data-chart" not in page and page.count("<script") == 1


def test_hostile_names_are_text_on_the_page(tmp_path):
    hostile = "</script></pre>\"'><img src=x onerror=alert(1)>{{ 7 * 7 }}"
    records = [record(0.5, alpha=hostile), record(0.6, alpha=hostile * 2), record(status=FAILED, alpha=0.5)]
    for each in records:
        each.parameters = {f"input/{hostile}": f"/models/{hostile}", "compute_dtype": hostile}
        each.tags = {f"version/{hostile}": hostile, "git/commit": hostile}
        each.references = {hostile: {"accuracy": 0.4}}
        each.units = {"accuracy": hostile}
        each.note = hostile
    records[2].error = hostile

    write_all(Results(hostile, ["alpha"], records), [*COMMAND, hostile], tmp_path)

    page = (tmp_path / "report.html").read_text()
    assert "<img src=x" not in page
    assert page.count("<script") == page.count("</script>") == 4
    assert "{{ 7 * 7 }}" in page


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


def test_no_cell_of_the_csv_is_a_formula_and_numbers_stay_numbers():
    records = [record(-0.5, word=word) for word in ("=1+2", "@x", "+cmd", "-a", "plain")]
    text = io.StringIO()

    write_csv(Results("t", ["word"], records), text)

    rows = list(csv.DictReader(io.StringIO(text.getvalue())))[: len(records)]
    assert [row["word"] for row in rows] == ["'=1+2", "'@x", "'+cmd", "'-a", "plain"]
    assert {row[str(records[0].metric)] for row in rows} == {"-0.5"}


@pytest.mark.parametrize("recipe, more, draws", [("knots", (), False), ("knots", ("drop=0.1",), True)])
def test_only_a_method_that_draws_numbers_is_said_to_have_one_seed(app, folder, recipe, more, draws):
    outcome = app(f"recipe={recipe}", "alpha=0.5,0.8", *more, "output=none", "-m")

    assert outcome.status == 0
    assert ("was drawn with one seed" in " ".join(outcome.out.split())) == draws

"""`figures`: vectors for a paper, as wide as its column, without titles, the same at each start."""

import re
from pathlib import Path

import pytest

from mecha_exp.report.figures.paper import Look
from mecha_exp.report.figures.style import NOTE, new_figure
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep


@pytest.fixture
def sweep(folder: Path) -> Path:
    """A sweep over words and numbers, in a folder with a space."""
    place = folder / "outputs/multiruns/a sweep"
    settings = [(recipe, alpha) for recipe in ("task_arithmetic", "ties") for alpha in (0.1, 0.2, 0.3)]
    Sweep("recipes", ["recipe", "alpha"], ["python"], len(settings), complete=True).save(place)
    for number, (recipe, alpha) in enumerate(settings):
        record = Record(f"recipe={recipe},alpha={alpha}", metric="accuracy", base="base")
        record.overrides = [f"recipe={recipe}", f"alpha={alpha}"]
        record.metrics = {"accuracy": 0.5 + alpha, "weights/relative_change/base": alpha}
        record.references = {"base": {"accuracy": 0.4}, "expert": {"accuracy": 0.01}}
        record.units = {"accuracy": "fraction of the images"}
        record.save(place / str(number))
    return place


@pytest.mark.parametrize(("width", "points"), [("3.25", 234), ("5.5", 396)])
@pytest.mark.usefixtures("figures")
def test_pdfs_have_the_width_of_the_column_and_no_fonts_that_conferences_refuse(app, sweep, width, points):
    outcome = app("figures", "--width", width, "--output", "to a paper")

    assert outcome.status == 0, outcome.err
    files = sorted(Path("to a paper").iterdir())
    assert {path.name for path in files} >= {"sweep.pdf", "sweep-heat-map.pdf", "sweep-distance.pdf"}
    for path in files:
        content = path.read_bytes()
        assert content.startswith(b"%PDF")
        assert float(re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", content)[1]) == pytest.approx(points)
        assert b"/Type3" not in content
        assert f"{path}: " in outcome.out
    assert "outside the picture: expert 0.01" in outcome.out


def test_svgs_are_the_same_at_each_start(app, sweep):
    assert app("figures", "--format", "svg", "--output", "one").status == 0
    assert app("figures", "--format", "svg", "--output", "two").status == 0

    names = [path.name for path in Path("one").iterdir()]
    assert names and all(name.endswith(".svg") for name in names)
    for name in names:
        assert (Path("one") / name).read_bytes() == (Path("two") / name).read_bytes()


def test_figures_lie_beside_the_sweep_by_default(app, sweep):
    assert app("figures").status == 0

    assert (sweep / "figures" / "sweep.pdf").is_file() and not list(sweep.glob("*.png"))


@pytest.mark.parametrize("words", [("--width", "0"), ("--font-size", "200")])
def test_measures_that_cannot_be_drawn_are_refused(app, sweep, words):
    outcome = app("figures", *words)

    assert outcome.status == 1 and "expected a width of 1 to 40 inches" in " ".join(outcome.err.split())


def test_a_figure_loses_its_titles_to_the_caption_and_its_labels_are_short():
    figure, (axes,) = new_figure()
    axes.set_title("a sweep\n95 % intervals over examples")
    axes.set_ylabel("accuracy [fraction of the images]\nmore is better")
    axes.annotate("outside the picture: a 1", (0, 0), gid=NOTE)
    axes.set_yticks([0, 1, 2], [f"recipe=a_long_name,alpha={n} (validation)" for n in (1, 2)] + ["b (test)"])

    said = Look("pdf", 3.25, 9).apply(figure)

    assert said == [
        "95 % intervals over examples",
        "outside the picture: a 1",
        "on validation where no split is named",
    ]
    assert axes.get_title() == "" and axes.get_ylabel() == "accuracy ↑" and not axes.texts
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "a_long_name, 1",
        "a_long_name, 2",
        "b (test)",
    ]
    assert figure.get_size_inches()[0] == 3.25

"""The page of a sweep in a browser: its figures, its filters, and the network that it does not ask."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from large_sweep import sweep

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.report import Results, write_all
from mecha_exp.report.verdict import verdict_of
from mecha_exp.runs.outcomes import POINT, WHOLE, ModelOutcomes
from mecha_exp.runs.record import Record

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


def swept(path: Path) -> Path:
    """A page of 12 settings with outcomes by example, of hostile names, written into a folder."""
    random = np.random.default_rng(0)
    easy, records, models = random.random(60), [], []
    for number, (recipe, alpha, k) in enumerate(
        (recipe, alpha, k) for recipe in ("ties", "<i>slerp") for alpha in (0.2, 0.5, 0.9) for k in (1, 2)
    ):
        right = (easy < 1 - abs(alpha - 0.5) - 0.1 * k).astype(float)
        settings = {"recipe": recipe, "alpha": alpha, "k": k}
        records.append(
            Record(
                f"{recipe},{alpha},{k}",
                overrides=[f"{key}={value}" for key, value in settings.items()],
                metrics={"accuracy": float(right.mean()), "loss": float(1 - right.mean())},
                metric="accuracy",
                references={"base": {"accuracy": 0.4}},
                tags={"signature": f"{number:012d}ab"},
            )
        )
        outcomes = {"accuracy": {WHOLE: Outcomes({"all": right})}}
        models.append(ModelOutcomes(POINT, number, records[-1].name, outcomes))
    results = Results("a sweep", ["recipe", "alpha", "k"], records)
    write_all(replace(results, verdict=verdict_of(results, models)), ["python"], path)
    return path / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return swept(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page with all of its charts drawn."""
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.open(page)
        opened.run("document.querySelectorAll('figure[data-chart]').forEach(show)")
        opened.wait_for("charts.forest.redraw && charts.curves.redraw && charts.parallel.redraw")
        yield opened


VISIBLE = "[...rows.values()].filter(row => !row.hidden).length"


@pytest.mark.heavy
def test_the_charts_take_the_place_of_the_pictures_and_nothing_is_fetched(browser: Browser, page: Path):
    assert browser.run("[...document.querySelectorAll('figure.drawn')].map(f => f.dataset.chart).sort()") == [
        "curves", "forest", "parallel",
    ]  # fmt: skip
    drawn = "document.querySelectorAll('figure[data-chart=forest] .errorbar').length"
    assert browser.run(drawn) == 11
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]


@pytest.mark.heavy
def test_a_mark_on_an_axis_filters_the_table_and_the_button_shows_all_again(browser: Browser):
    x, top, bottom = browser.run(
        "(brush => { brush.scrollIntoView({block: 'center'}); const at = brush.getBoundingClientRect();"
        " return [at.x + at.width / 2, at.top, at.bottom]; })"
        "(document.querySelectorAll('[data-chart=parallel] .axis-brush .background')[1])"
    )
    height = bottom - top  # of alpha, 0.2 to 0.9
    browser.drag((x, bottom - 0.3 * height), (x, bottom - 0.6 * height))
    browser.wait_for("ranges.size")

    assert browser.run(VISIBLE) == 4
    assert browser.run("told.textContent") == "4 of 12 settings"
    assert browser.run("charts.curves.box.data.flatMap(trace => trace.customdata ?? []).length") == 4

    browser.run("clear.click()")

    assert browser.run(VISIBLE) == 12
    assert browser.run("charts.parallel.box.data[0].dimensions.some(d => d.constraintrange)") is False


@pytest.mark.heavy
def test_words_filter_the_table(browser: Browser):
    browser.run("words.value = 'SLERP 0.55'; words.dispatchEvent(new Event('input'))")
    assert browser.run(VISIBLE) == 1
    browser.run("words.value = ''; words.dispatchEvent(new Event('input'))")
    assert browser.run(VISIBLE) == 12


@pytest.mark.heavy
def test_a_selected_setting_has_its_numbers_and_its_command(browser: Browser):
    browser.run("charts.forest.box.emit('plotly_click', {points: [{customdata: 3}]})")

    text = browser.run("panel.innerText")
    name, signature = browser.run("data.points[3][0]")
    assert f"python -m mecha_exp reproduce {signature}" in text and "after Holm" in text
    assert browser.run("[...document.querySelectorAll('tr.chosen')].map(r => r.dataset.setting)") == ["3"]
    assert name.split(",")[1] in text
    browser.run("dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert browser.run("panel.hidden") is True


@pytest.mark.heavy
def test_the_curves_have_intervals_and_their_axis_the_base(browser: Browser):
    browser.run("const metric = document.querySelector('figure[data-chart=curves] select'); metric.value = 0;"
                "metric.dispatchEvent(new Event('change'))")  # fmt: skip

    low, high = browser.run("charts.curves.box._fullLayout.yaxis.range")
    ends = browser.run("data.metrics[0].intervals.flat()")
    names = browser.run("charts.curves.box.layout.annotations.map(a => a.text)")
    bars = browser.run(
        "charts.curves.box.data.flatMap(t => t.error_y?.array ?? []).filter(v => v > 0).length"
    )
    assert low <= min(*ends, 0.4) and max(ends) <= high
    assert names == ["base"] and bars == 12


@pytest.mark.heavy
def test_another_metric_and_key_draw_the_curves_again(browser: Browser):
    browser.run("const list = document.querySelector('figure[data-chart=curves] select'); list.value = 1;"
                "list.dispatchEvent(new Event('change'))")  # fmt: skip
    assert browser.run("charts.curves.box.layout.yaxis.title.text") == "loss"
    names = "charts.curves.box.data.filter(t => t.showlegend).map(t => t.name).sort()"
    assert browser.run(names) == ["&lt;i&gt;slerp", "ties"]


@pytest.mark.heavy
def test_the_table_sorts_itself(browser: Browser):
    browser.run("document.querySelectorAll('#results th button')[1].click()")
    column = "[...document.querySelectorAll('#results tr[data-setting]')].map(r => r.cells[1].textContent)"
    assert browser.run(column) == sorted(browser.run(column))
    assert browser.run("document.querySelectorAll('#results th')[1].ariaSort") == "ascending"


def test_without_scripts_everything_stands_there(page: Path, tmp_path: Path):
    with Browser(tmp_path / "browser", scripts=False) as browser:
        browser.open(page)
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    texts = [node["name"]["value"] for node in tree if not node["ignored"] and "name" in node]
    roles = [node["role"]["value"] for node in tree if not node["ignored"]]
    assert roles.count("image") == 2 and roles.count("columnheader") >= 5
    assert any("95 % interval" in text for text in texts)


@pytest.mark.heavy
def test_a_page_of_a_thousand_points_is_small_enough_to_be_sent(tmp_path: Path):
    write_all(sweep(1000), ["python"], tmp_path)

    page = tmp_path / "report.html"
    assert page.stat().st_size < 5e6
    with Browser(tmp_path / "browser") as browser:
        browser.open(page)
        browser.wait_for("charts.forest.redraw")
        assert browser.run(VISIBLE) == 1000 and browser.errors == []

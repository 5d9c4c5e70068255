"""Results made with another torch, or on another processor, are marked wherever they are shown."""

import json

import pytest

from mecha_exp.report.conclusion import concluded_results
from mecha_exp.report.page.html import write_report
from mecha_exp.runs.environment import are_mixed, deciding_facts, differs_from_here
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep

HERE = {
    "version/torch": "2.13.0",
    "machine/torch_uses": "AVX512",
    "machine/vector_features": "sse4_2 avx avx2 avx512f",
}
OTHERS = {
    "torch": ({"version/torch": "2.12.0"}, "torch 2.12.0 (here 2.13.0)"),
    "kernels": ({"machine/torch_uses": "AVX2"}, "torch's kernels for AVX2 (here AVX512)"),
    "fewer features": ({"machine/vector_features": "sse4_2 avx avx2"}, "a processor without avx512f"),
    "other features": (
        {"machine/vector_features": "asimd sve"},
        "a processor without sse4_2, avx, avx2, avx512f and with asimd, sve",
    ),
    "MKL": ({"machine/mkl_cbwr": "COMPATIBLE"}, "MKL_CBWR=COMPATIBLE (here unset)"),
}


@pytest.mark.parametrize("others", OTHERS)
def test_what_a_result_was_made_with_is_compared_with_this_process(others, monkeypatch):
    monkeypatch.setattr("mecha_exp.runs.environment.deciding_facts", lambda: HERE)
    tags, words = OTHERS[others]

    assert differs_from_here({**HERE, **tags}) == (words,)
    assert are_mixed([HERE, {**HERE, **tags}])


def test_what_is_alike_or_unknown_is_not_marked(monkeypatch):
    monkeypatch.setattr("mecha_exp.runs.environment.deciding_facts", lambda: HERE)

    assert differs_from_here(HERE) == differs_from_here({}) == differs_from_here({"git/commit": "abc"}) == ()
    assert not are_mixed([HERE, {**HERE, "machine/cpu": "another name"}])


@pytest.fixture
def sweep(folder):
    """A sweep of three points, of which the second was made elsewhere."""
    place = folder / "outputs/multiruns/one"
    Sweep("one", ["alpha"], ["python", "-m", "mecha_exp", "-m"], 3).save(place)
    for number, alpha in enumerate((0.3, 0.4, 0.5)):
        name, tags = f"alpha={alpha}", deciding_facts() | (ELSEWHERE if number == 1 else {})
        Record(name, overrides=[name], metrics={"loss": alpha}, tags=tags, metric="loss").save(
            place / str(number)
        )
    return place


ELSEWHERE = {"version/torch": "1.0", "machine/torch_uses": "DEFAULT"}


def test_a_point_that_was_made_elsewhere_has_a_mark_in_ls_table_and_show(app, sweep):
    table, listed, shown = app("table"), app("ls"), app("show", "alpha=0.4")
    rows = json.loads(app("table", "--json").out)["rows"]
    points = json.loads(app("ls", "--json").out)["points"]

    for outcome in (table, listed):
        marked = [line for line in outcome.out.splitlines() if "†" in line and not line.startswith("†")]
        assert len(marked) == 1 and "0.4" in marked[0]
        assert f"† made with torch 1.0 (here {deciding_facts()['version/torch']})," in outcome.out
    assert "Points were made with different versions of torch" in table.out
    assert "made with  torch 1.0" in shown.out
    assert [bool(row["made_with"]) for row in rows] == [False, True, False]
    assert sorted(bool(point["made_with"]) for point in points) == [False, False, True]


def test_a_point_that_was_made_elsewhere_has_a_mark_in_the_page_and_limits_the_verdict(sweep):
    write_report(concluded_results(Sweep.load(sweep), sweep), [], [], sweep / "report.html")
    page = (sweep / "report.html").read_text()

    assert page.count('title="made with another torch or processor"') == 1
    assert "† made with torch 1.0 (here" in page
    assert page.index("different versions of torch") < page.index("The question")

"""Files that an evaluator returns: stored by signature, in the run's folder, the report and MLflow."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from mecha_exp import Measurement, Outcomes, evaluator
from mecha_exp.report.figures.contact_sheet import Page, draw_page, pages_of
from mecha_exp.report.sweep_results import results_of
from mecha_exp.runs.sweep import Sweep

CALLS: list[str] = []


def png(colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def draws() -> None:
    """Registers `test_draws`, whose pictures show the value of a weight."""
    CALLS.clear()

    @evaluator("test_draws", metric="hits", splits=("validation", "test"))
    def test_draws(state_dict, *, split: str):
        CALLS.append(split)
        value = int(state_dict["fc1.weight"].double().abs().mean() * 1e5) % 256
        outcomes = Outcomes({"a": [1, 0, value > 128]})
        return Measurement(outcomes=outcomes, files={"red.png": png((value, 0, 0)), "note.txt": b"text"})


@pytest.mark.usefixtures("figures")
def test_files_are_stored_shown_and_logged_and_served_without_measuring(app, folder, draws, monkeypatch):
    monkeypatch.setattr("mecha_exp.report.files.draw_figures", lambda *rest: [])  # tested elsewhere
    command = (
        "alpha=0.2,0.6,0.4",
        "output=none",
        "evaluator.name=test_draws",
        "evaluator.weight_stats=false",
    )

    outcome = app(*command, "-m", tracked=True)

    assert outcome.status == 0, outcome.err
    (sweep,) = (folder / "outputs/multiruns").iterdir()
    red = {n: (sweep / f"{n}/files/red.png").read_bytes() for n in range(3)}
    assert len(set(red.values())) == 3
    reported = [n for n in range(3) if (sweep / f"{n}/files/test/note.txt").is_file()]
    assert len(reported) == 1
    inputs = sorted(path.name for path in (sweep / "files/inputs").iterdir())
    assert inputs == ["base", "expert_0_3", "expert_4_6", "expert_7_9"]
    page = (sweep / "report.html").read_text()
    assert '<a href="1/files/red.png">red.png</a>' in page
    assert "The pictures of each point" in page
    logged = {path.name for path in folder.glob("outputs/mlartifacts/**/*") if path.is_file()}
    assert {"red.png", "note.txt", "sweep-xyz.png"} <= logged
    assert len(CALLS) == 3 + 1 + 2 * len(inputs)

    (folder / "elsewhere").mkdir()
    again = app(*command, "-m", "hydra.sweep.dir=elsewhere/sweep")

    assert again.status == 0, again.err
    assert len(CALLS) == 3 + 1 + 2 * len(inputs)
    assert {n: (folder / f"elsewhere/sweep/{n}/files/red.png").read_bytes() for n in range(3)} == red


@pytest.mark.usefixtures("draws")
def test_one_key_makes_columns_beside_the_inputs_and_pictures_make_rows(app, folder):
    app("alpha=0.2,0.6", "output=none", "evaluator.name=test_draws", "-m", "hydra.sweep.dir=sweep")
    sweep = Sweep.load(folder / "sweep")

    pages = pages_of(results_of(sweep, folder / "sweep"), folder / "sweep")

    (page,) = pages
    assert page.columns == ["base", "expert_0_3", "expert_4_6", "expert_7_9", "alpha=0.2", "alpha=0.6"]
    assert page.rows == ["red", "test/red"]


def test_two_keys_make_columns_and_rows_and_further_ones_pages(tmp_path):
    settings = [(a, k, s) for a in (1, 2, 3) for k in (4, 5) for s in (6, 7)]
    for number, (a, k, s) in enumerate(settings):
        (tmp_path / f"{number}/files").mkdir(parents=True)
        (tmp_path / f"{number}/files/cat.png").write_bytes(png((a, k, s)))
        record = {"name": str(number), "overrides": [f"seed={s}", f"k={k}", f"alpha={a}"]}
        (tmp_path / f"{number}/run.json").write_text(json.dumps(record))
    sweep = Sweep("t", ["seed", "k", "alpha"], [], len(settings))

    first, second = pages_of(results_of(sweep, tmp_path), tmp_path)

    assert first.heading == "k=4, cat"
    assert first.columns == ["alpha=1", "alpha=2", "alpha=3"]
    assert first.rows == ["seed=6", "seed=7"]
    assert second.heading == "k=5, cat"
    drawn = draw_page(second)
    pixels = {drawn.getpixel((x, y)) for x in range(drawn.width) for y in range(drawn.height)}
    assert {(a, 5, s) for a in (1, 2, 3) for s in (6, 7)} <= pixels
    assert not {(a, 4, s) for a in (1, 2, 3) for s in (6, 7)} & pixels


def test_a_missing_picture_is_an_empty_tile_and_a_large_one_is_made_smaller(tmp_path):
    (tmp_path / "a.png").write_bytes(png((9, 9, 9), (2000, 1000)))
    page = Page("", {("x", "1"): tmp_path / "a.png", ("y", "2"): tmp_path / "a.png"})

    drawn = draw_page(page)

    assert drawn.width < 2 * 512 + 100
    colours = {drawn.getpixel((drawn.width - 20, y)) for y in range(drawn.height)}
    assert {(9, 9, 9), (0xE4, 0xE8, 0xEC)} <= colours


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"../a.png": b""}, "a file named '../a.png': use letters, digits, spaces"),
        ({".hidden": b""}, "a file named '.hidden'"),
        ({7: b""}, "a file named 7"),
        ({"a.png": b"", "A.png": b""}, "two files that are 'A.png' where case does not count"),
        ({"a.png": 7}, "the file 'a.png', which is neither bytes nor a path"),
        ({"a.png": Path("missing.png")}, "the file 'a.png', which is neither bytes nor a path"),
        ([b"a"], "returned files as list: expected contents by name"),
    ],
)
def test_files_that_cannot_be_kept_are_refused(files, message):
    from mecha_exp.errors import EvaluationError
    from mecha_exp.evaluation.declaration import Evaluator
    from mecha_exp.evaluation.measurement import measured_by

    returned = SimpleNamespace(score=lambda state_dict: Measurement({"m": 1.0}, files=files))
    entry = Evaluator("test", returned.score, "m", "maximize", lambda shapes: True)

    with pytest.raises(EvaluationError, match="the evaluator 'test' returned") as error:
        measured_by(entry, {}, {})

    assert message in str(error.value)


def test_a_number_that_follows_from_outcomes_is_not_given_twice():
    from mecha_exp.errors import EvaluationError
    from mecha_exp.evaluation.declaration import Evaluator
    from mecha_exp.evaluation.measurement import measured_by

    outcomes = Outcomes({"a": [1, 0]})
    entry = Evaluator("t", lambda s: Measurement({"m/a": 1.0}, outcomes), "m", "maximize", lambda s: True)

    with pytest.raises(EvaluationError, match="'m/a' as a metric and as outcomes"):
        measured_by(entry, {}, {})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "[alpah]",
            "evaluator.sheet: 'alpah' is not swept. Did you mean 'alpha'? 'picture' stands for",
        ),
        (
            "[picture,seed]",
            "'seed' is not swept. Known: alpha, k, picture. 'picture' stands for the pictures of a",
        ),
        (
            "[alpha,alpha]",
            "evaluator.sheet=['alpha', 'alpha']: expected the keys of columns, rows and pages, as",
        ),
        ("alpha", "evaluator.sheet=alpha: expected the keys of columns, rows and pages, as in [alpha,k]"),
        ("[]", "evaluator.sheet=[]: expected the keys of columns, rows and pages, as in [alpha,k]"),
    ],
)
def test_a_sheet_of_keys_that_are_not_swept_is_refused_before_a_merge(app, folder, value, message):
    outcome = app("alpha=0.2,0.6", "k=0.1,0.2", "output=none", f"evaluator.sheet={value}", "-m")

    assert outcome.status == 1
    assert message in " ".join(outcome.err.split())
    assert not (folder / "outputs/multiruns").exists()

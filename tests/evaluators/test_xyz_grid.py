"""From the command of the documentation to a contact sheet: as a file, in the report and in MLflow."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from mecha_exp.report.figures.contact_sheet import draw_page, pages_of
from mecha_exp.report.sweep_results import results_of
from mecha_exp.runs.sweep import Sweep

pytest.importorskip("diffusers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

PAGE = Path(__file__).parents[2] / "docs/images.md"
ALPHAS = ["alpha=0.2", "alpha=0.4", "alpha=0.6", "alpha=0.8", "alpha=1"]


@pytest.fixture
def models(pipelines: Path, tmp_path: Path) -> Path:
    """The models of the page, in the current folder of its command."""
    from tiny_vision import save_pipeline

    shutil.copytree(pipelines / "a", tmp_path / "pipeline")
    shutil.copytree(pipelines / "b", tmp_path / "photos")
    save_pipeline(tmp_path / "drawings", 2)
    return tmp_path


def documented(models: Path) -> list[str]:
    """The words of the command on the page, whose prompts are written as it says."""
    lines, command = re.findall(
        r"^```text\nprintf '(.*?)' > prompts.txt\npython -m mecha_exp (.*?)^```",
        PAGE.read_text(),
        re.M | re.S,
    )[0]
    (models / "prompts.txt").write_text(lines.replace("\\n", "\n"))
    return shlex.split(command.replace("\\\n", " "))


def test_the_documented_command_draws_a_sheet_with_labels_and_scores(models, as_a_user):
    more = ["evaluator.steps=1", "evaluator.device=cpu", "hydra.sweep.dir=sweep"]

    outcome = as_a_user(*documented(models), *more, cwd=models)

    assert outcome.status == 0, outcome.err
    assert "Loading" not in outcome.err  # the libraries' own bars
    sweep = models / "sweep"
    sheets = sorted(path.name for path in sweep.glob("sweep-xyz*.png"))
    assert sheets == [
        "sweep-xyz-2.png",
        "sweep-xyz-3.png",
        "sweep-xyz-4.png",
        "sweep-xyz-5.png",
        "sweep-xyz.png",
    ]
    pages = pages_of(results_of(Sweep.load(sweep), sweep), sweep)
    for page in pages[:4]:
        assert page.columns == ALPHAS
        assert page.rows == ["recipe=task_arithmetic", "recipe=ties"]
        assert all(re.fullmatch(r"distance \d+(\.\d+)?", caption) for caption in page.captions.values())
    assert pages[0].heading == "01 a photo of a cat seed 0"
    assert (pages[4].heading, pages[4].columns) == ("the inputs", ["drawings", "photos", "pipeline"])
    with Image.open(sweep / "sweep-xyz.png") as sheet:
        assert sheet.tobytes() == draw_page(pages[0]).tobytes()
        above = sheet.crop((0, 0, sheet.width, 48)).convert("L")
        assert above.getextrema()[0] < 64  # the ink of the labels of the columns
    report = (sweep / "report.html").read_text()
    assert report.count("Pictures: 01 a photo of a cat seed 0") >= 1
    logged = {path.name for path in models.glob("outputs/mlartifacts/**/*") if path.is_file()}
    assert {"01 a photo of a cat seed 0.png", *sheets} <= logged


def test_rows_columns_and_pages_are_chosen_and_drawn_anew_without_measuring(models, as_a_user):
    words = [*documented(models), "evaluator.steps=1", "evaluator.device=cpu", "tracking=none"]
    words += ["hydra.sweep.dir=sweep", "alpha=0.2,0.4", "evaluator.seeds=[0]"]
    assert as_a_user(*words, cwd=models).status == 0
    files = {path: path.stat().st_mtime_ns for path in models.glob("sweep/*/files/*.png")}

    outcome = as_a_user(*words, "evaluator.sheet=[picture,alpha,recipe]", cwd=models)

    assert outcome.status == 0, outcome.err
    sweep = models / "sweep"
    pages = pages_of(results_of(Sweep.load(sweep), sweep), sweep)
    assert [page.heading for page in pages] == ["recipe=task_arithmetic", "recipe=ties", "the inputs"]
    assert pages[0].columns == ["01 a photo of a cat seed 0", "02 a house by the sea seed 0"]
    assert pages[0].rows == ["alpha=0.2", "alpha=0.4"]
    with Image.open(sweep / "sweep-xyz-2.png") as sheet:
        assert sheet.tobytes() == draw_page(pages[1]).tobytes()
    assert {path: path.stat().st_mtime_ns for path in models.glob("sweep/*/files/*.png")} == files


SCORER = """
import json
from pathlib import Path

def interrupted(pictures, prompts):
    kept = {f.name: f.stat().st_mtime_ns for f in Path("outputs/store").rglob(".evaluation-*.partial.*.png")}
    with Path("seen.jsonl").open("a") as file:
        file.write(json.dumps(kept) + "\\n")
    if len(Path("seen.jsonl").read_text().splitlines()) == 1:
        raise KeyboardInterrupt
    return [0.5 for _ in pictures]
"""


def test_the_same_command_after_ctrl_c_draws_no_picture_twice(models, as_a_user):
    (models / "mine.py").write_text(SCORER)
    (models / "prompts.txt").write_text("a photo of a cat\na house by the sea\n")
    words = ["models.base=pipeline", "models.experts=[photos]", "recipe=weighted_sum", "alpha=0.5", "-m"]
    words += ["output=none", "tracking=none", "evaluator=images", "evaluator.prompts=prompts.txt"]
    words += ["evaluator.steps=1", "evaluator.device=cpu", "evaluator.scorer=mine.py:interrupted"]
    words += ["evaluator.distances=false"]

    first = as_a_user(*words, cwd=models)
    second = as_a_user(*words, cwd=models)

    assert (first.status, second.status) == (130, 0), second.err
    seen = [json.loads(line) for line in (models / "seen.jsonl").read_text().splitlines()]
    assert len(seen[0]) == 2
    assert seen[1] == seen[0]  # the files of the first start, which were read and not written
    assert not list((models / "outputs/store").rglob("*.partial*"))

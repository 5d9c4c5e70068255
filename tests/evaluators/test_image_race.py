"""Diffusion models that race: no picture is drawn twice, and a sheet tells which were never drawn."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import FEW, PROMPTS, context_of, measured
from PIL import Image
from safetensors.torch import save_file
from state_dicts import numbers_of

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import Outcomes, read_scoring
from mecha_exp.evaluators.pictures.aesthetics import Predictor
from mecha_exp.evaluators.pictures.racing import best_score
from mecha_exp.report.figures.contact_sheet import Page, draw_page, pages_of
from mecha_exp.report.sweep_results import results_of
from mecha_exp.runs.sweep import Sweep

pytest.importorskip("diffusers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

ALPHAS = ("0.0", "0.5", "1.0", "6.0")
WORDS = ("cat", "dog", "eel", "small", "drawing", "photo", "the", "of")
MANY = [
    f"a {first} {second} {third}" for first, second, third in itertools.product(WORDS[:6], WORDS, WORDS[:2])
]
ONCE = ("evaluator.steps=1", "evaluator.guidance=1.0", "evaluator.distances=false")
SCORER = """
import json
from pathlib import Path

import numpy as np

def alone(pictures, prompts):
    pixels = [np.asarray(picture) for picture in pictures]
    return [float(((values > 0) & (values < 255)).mean()) for values in pixels]

def tenfold(pictures, prompts):
    return [10 * score for score in alone(pictures, prompts)]

def together(pictures, prompts):
    scores = np.array([np.asarray(picture).mean() for picture in pictures])
    return scores - scores.mean()

def few(pictures, prompts):
    return [1.0]

def square(pictures, prompts):
    return [{(16, 16): 1.0}[picture.size] for picture in pictures]

def counted(pictures, prompts):
    with Path("calls").open("a") as file:
        file.write(f"{len(pictures)} ")
    return [1.0 for _ in pictures]
"""


@pytest.fixture
def folder(pipelines: Path) -> Path:
    return pipelines


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A file with functions that score pictures."""
    path = tmp_path / "mine.py"
    path.write_text(SCORER)
    return str(path)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each picture is drawn, of all models together."""
    from mecha_exp.evaluators.pictures import drawing

    counted: Counter[str] = Counter()
    one = drawing.Drawing._one

    def counting(self, made, shot):
        counted[shot.name] += 1
        return one(self, made, shot)

    monkeypatch.setattr(drawing.Drawing, "_one", counting)
    return counted


@pytest.fixture
def command(folder: Path, line_of_models, tmp_path: Path):
    """Runs a sweep between two pipelines in this process; returns the rows of its table by alpha."""

    def run(prompts: list[str], *words: str, to: str) -> dict[str, dict[str, str]]:
        (tmp_path / "prompts.txt").write_text("\n".join(prompts))
        chosen = (f"alpha={','.join(ALPHAS)}", "evaluator=images", "evaluator.prompts=prompts.txt", *ONCE)
        return line_of_models(folder / "a", folder / "b", *chosen, *words, to=to)

    return run


def some(outcomes: Outcomes, places: list[int]) -> Outcomes:
    """The outcomes of some pictures."""
    parts = (outcomes.values, outcomes.examples, outcomes.clusters)
    return Outcomes.checked_before(*({"pictures": part["pictures"][places]} for part in parts))


def test_pictures_of_a_part_are_those_that_they_are_among_all(folder, drawn):
    settings = {"clip": str(folder / "clip"), "race": True}
    whole = measured(folder, **settings)
    drawn.clear()
    context = context_of(folder)
    weights = numbers_of(folder / "merged")
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    scoring = read_scoring({"name": "images", **FEW, **settings}, shapes, context=context)

    part = scoring.measure_one(scoring.evaluations[0].among({"pictures": [1, 2]}), weights, context)

    names = ["01 a photo of a cat seed 3", "02 a drawing of the dog seed 0"]
    assert part.files == {f"{name}.png": whole.files[f"{name}.png"] for name in names}
    assert drawn == dict.fromkeys(names, 1)  # and none of the inputs
    assert part.outcomes.examples["pictures"].tolist() == names
    expected = some(whole.outcomes, [1, 2]).values["pictures"]
    np.testing.assert_allclose(part.outcomes.values["pictures"], expected, rtol=1e-5)


def files_of(sweep: Path, alpha: str) -> list[Path]:
    """The pictures of a point."""
    return sorted((sweep / str(ALPHAS.index(alpha))).glob("files/*.png"))


def numbers(row: Mapping[str, str]) -> dict[str, str]:
    """What was measured of a point, with all digits."""
    return {name: row[name] for name in ("score", "clip_score")}


def test_points_race_by_their_clip_score_and_no_picture_is_drawn_twice(command, folder, tmp_path, drawn):
    clip = f"evaluator.clip={folder / 'clip'}"
    whole = command(MANY, clip, "store=null", to="whole")
    of_all = drawn.total()
    drawn.clear()

    race = command(MANY, clip, "evaluator.race=true", to="race")

    left = [alpha for alpha, row in race.items() if row["status"] == "FINISHED"]
    best = max(ALPHAS, key=lambda alpha: float(whole[alpha]["score"]))
    assert best in left and "6.0" not in left and race["6.0"]["status"] == "DROPPED"
    for alpha in left:
        assert numbers(race[alpha]) == numbers(whole[alpha])
        assert race[alpha]["race/examples"] == f"{len(MANY)}.0"
    measured_of = {alpha: int(float(row["race/examples"])) for alpha, row in race.items()}
    assert drawn.total() == sum(measured_of.values()) + 2 * len(MANY)  # each once, and those of the inputs
    assert drawn.total() < of_all == (len(ALPHAS) + 2) * len(MANY)
    for alpha in ALPHAS:
        names = [path.name for path in files_of(tmp_path / "race", alpha)]
        assert len(names) == measured_of[alpha]
        pictures = {path.name: path.read_bytes() for path in files_of(tmp_path / "whole", alpha)}
        assert {p.name: p.read_bytes() for p in files_of(tmp_path / "race", alpha)} == {
            name: pictures[name] for name in names
        }
    assert not [*tmp_path.rglob("*.partial*")]


def test_a_race_that_was_interrupted_draws_no_picture_twice(command, folder, mine, drawn, monkeypatch):
    from mecha_exp.evaluators.pictures import drawing

    words = (f"evaluator.scorer={mine}:alone", "evaluator.race=halving", "evaluator.race_looks=[1/4,1/2]")
    one = drawing.Drawing._one

    def interrupted(self, made, shot):
        if drawn.total() == 2 * 16 + 6:  # in the race, after the inputs
            raise KeyboardInterrupt
        return one(self, made, shot)

    with monkeypatch.context() as patch:
        patch.setattr(drawing.Drawing, "_one", interrupted)
        with pytest.raises((KeyboardInterrupt, AssertionError)):  # the status of an interrupt is not 0
            command(MANY[:16], *words, to="race")
    assert drawn.total() == 2 * 16 + 6

    rows = command(MANY[:16], *words, to="race")

    assert drawn.total() == 2 * 16 + sum(float(row["race/examples"]) for row in rows.values())


def test_a_score_of_another_scale_races_by_the_best_that_is_said(command, mine, drawn):
    words = (f"evaluator.scorer={mine}:tenfold", "evaluator.race=true", "evaluator.race_best=10")

    rows = command(MANY[:32], *words, to="race")

    assert rows["6.0"]["status"] == "DROPPED" and float(rows["6.0"]["race/score"]) > 1
    left = [row for row in rows.values() if row["status"] == "FINISHED"]
    assert left and all(float(row["score"]) > 9 for row in left)
    assert drawn.total() == 2 * 32 + sum(float(row["race/examples"]) for row in rows.values())


def test_a_sheet_says_which_pictures_were_not_drawn(command, mine, tmp_path):
    words = (f"evaluator.scorer={mine}:alone", "evaluator.race=halving", "evaluator.race_looks=[1/4,1/2]")
    rows = command(MANY[:8], *words, "evaluator.sheet=[alpha,picture]", to="sweep")
    sweep = tmp_path / "sweep"

    points, *_ = pages = pages_of(results_of(Sweep.load(sweep), sweep), sweep)

    assert len(pages) == 1 and points.columns == ["a", "b", *(f"alpha={float(a):g}" for a in ALPHAS)]
    assert len(points.rows) == 8 and points.rows == sorted(points.rows)
    for alpha in ALPHAS:
        column = f"alpha={float(alpha):g}"
        count = int(float(rows[alpha]["race/examples"]))
        captions = Counter(points.captions[column, row].split()[0] for row in points.rows)
        if rows[alpha]["status"] == "FINISHED":
            assert captions == {"score": 8}
        else:
            assert captions == {"dropped": count, "not": 8 - count} and 0 < count < 8
        for row in points.rows:
            file, words_below = points.tiles[column, row], points.captions[column, row]
            assert (file is None) == (words_below == "not drawn")
            assert file is None or Image.open(file).size == (16, 16)
    assert {row["status"] for row in rows.values()} == {"FINISHED", "DROPPED"}
    assert draw_page(points).size[0] > 0


def test_a_page_of_pictures_that_were_never_drawn_has_empty_places_that_say_so():
    places = [("alpha=1", "a photo"), ("alpha=3", "a photo")]
    page = Page("recipe=ties", dict.fromkeys(places), dict.fromkeys(places, "not drawn"))

    sheet = draw_page(page).convert("L")

    assert page.columns == ["alpha=1", "alpha=3"] and sheet.width > 2 * 512
    empty = np.asarray(sheet)[-512:, -512:]
    assert empty.min() < 64 < 200 < np.median(empty) < 255  # words on grey


def said(folder: Path, **settings: object) -> str:
    """The error of the checks before a merge, where points race."""
    shapes = {key: tuple(tensor.shape) for key, tensor in numbers_of(folder / "merged").items()}
    asked = {"name": "images", "race": True, **FEW, **settings}
    with pytest.raises(ConfigError) as error:
        read_scoring(asked, shapes, context=context_of(folder))
    return str(error.value)


def test_points_do_not_race_by_their_distance_from_the_inputs(folder):
    assert said(folder) == (
        "evaluator.race=true: no score is asked for but the distance from the inputs' pictures, which says "
        "nothing about quality: a point would be dropped because it differs from its inputs. Give "
        "evaluator.clip, evaluator.preference or evaluator.scorer, or leave evaluator.race out."
    )


def test_one_prompt_is_refused_as_its_pictures_stay_together(folder):
    assert said(folder, prompts=PROMPTS[:1], clip=str(folder / "clip"), race="halving") == (
        "evaluator.race=halving: pictures of one prompt stay together, and there is one prompt: no point "
        "could be dropped before it has all pictures. List more prompts, or leave evaluator.race out."
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "together",
            r" gives a picture -?[\d.]+ among 4 pictures and -?[\d.]+ among 2 of them, so it looks at all "
            r"pictures together, or draws at random: points race by a number for each picture alone. Mend "
            r"it, or leave evaluator.race out.",
        ),
        ("few", r": the scorer gave 1 numbers for 4 pictures: expected one for each."),
        (
            "square",
            r" cannot be tried on pictures of noise of 64 x 64 pixels: KeyError: \(64, 64\). Mend it, set "
            r"evaluator.width and evaluator.height where it needs others, or leave evaluator.race out.",
        ),
    ],
)
def test_a_scorer_of_all_pictures_together_is_refused(folder, mine, function, message):
    named = re.escape(f"evaluator.race=true: evaluator.scorer={mine}:{function}")

    assert re.fullmatch(named + message, said(folder, scorer=f"{mine}:{function}"))


def test_a_scorer_is_tried_once_at_the_size_that_is_asked_for(folder, mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shapes = {key: tuple(tensor.shape) for key, tensor in numbers_of(folder / "merged").items()}
    asked = {"name": "images", "race": True, **FEW}

    for _ in range(3):
        read_scoring({**asked, "scorer": f"{mine}:counted"}, shapes, context=context_of(folder))
    read_scoring(
        {**asked, "scorer": f"{mine}:square", "width": 16, "height": 16}, shapes, context=context_of(folder)
    )

    assert Path("calls").read_text() == "4 2 "


def layers_of(random: np.random.Generator, *widths: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    return tuple(
        (torch.from_numpy(random.normal(size=(to, of))), torch.from_numpy(random.normal(size=to)))
        for of, to in itertools.pairwise(widths)
    )


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("widths", [(12, 1), (12, 7, 1), (12, 7, 5, 1)])
def test_no_features_have_a_higher_score_than_the_most_of_a_predictor(activation, widths):
    random = np.random.default_rng(0)
    predictor = Predictor(layers_of(random, *widths), activation)
    weight = torch.eye(12, dtype=torch.float64)
    for matrix, _ in predictor.layers:
        weight = matrix @ weight
    drawn = torch.from_numpy(random.normal(size=(1000, 12)))
    features = torch.cat([drawn, weight])
    features /= features.norm(dim=1, keepdim=True)

    scores, most = predictor.scores(features), predictor.most(1)

    assert scores.max() <= most * (1 + 1e-12)
    if activation == "none":
        assert scores[-1] == pytest.approx(most)  # of the features that it likes best


def test_the_best_score_is_that_of_the_score_that_counts(folder, tmp_path):
    clip = str(folder / "clip")
    save_file(
        {"weight": torch.tensor([[3.0, 4.0] + [0.0] * 10]), "bias": torch.tensor([2.0])},
        tmp_path / "p.safetensors",
    )
    nothing = dict.fromkeys(("clip", "aesthetic", "preference", "scorer"))
    aesthetic = {"clip": clip, "aesthetic": str(tmp_path / "p.safetensors")}
    scale = float(numbers_of(folder / "clip")["logit_scale"].exp())

    def best(**settings: object) -> float | None:
        return best_score(context_of(folder), {**nothing, **settings})

    assert best(clip=clip) == pytest.approx(100, rel=1e-5)
    assert best(preference=clip, **aesthetic) == pytest.approx(scale, rel=1e-5)
    assert best(**aesthetic) == pytest.approx(7, rel=1e-5)
    assert best(scorer="mine.py:alone", **aesthetic) is None

"""What a search shows beside its table: importances, slices, contours, and what it gained over chance."""

import random
from dataclasses import replace

import numpy as np
import pytest
from sweep_folders import sweep_of

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.report.figures.landscape import contours, importance_bars, slices
from mecha_exp.report.results import Results
from mecha_exp.report.search.gain import gain_note
from mecha_exp.report.search.importance import FANOVA, PED_ANOVA, importances_of
from mecha_exp.report.search.notes import search_notes
from mecha_exp.runs.record import Record
from mecha_exp.verdict import Candidate, conclude

pytest.importorskip("optuna", minversion="4")


def record(number: int, hits: float, **keys: object) -> Record:
    words = [f"{key}={value}" for key, value in keys.items()]
    fields = {"metric": "hits", "direction": "maximize", "directions": {"hits": "maximize"}}
    return Record(",".join(words), overrides=words, metrics={"hits": hits}, **fields)


def searched(count: int = 60, drawn: int = 0, **more) -> Results:
    """A search whose metric depends on alpha alone, and hardly on k; `word` has no effect."""
    chance = random.Random(0)
    records = []
    for number in range(count):
        alpha, k, word = chance.random(), 10 ** chance.uniform(-3, 0), chance.choice("xy")
        records.append(record(number, -((alpha - 0.5) ** 2) + 0.001 * k, alpha=alpha, k=k, word=word))
    at_random = frozenset(id(r) for r in records[:drawn])
    return Results("a search", ["alpha", "k", "word"], records, mode="search", at_random=at_random, **more)


@pytest.mark.parametrize("has_sklearn", [True, False])
def test_the_key_that_decides_has_nearly_all_of_the_importance(monkeypatch, has_sklearn):
    from mecha_exp.report.search import importance

    if has_sklearn:
        pytest.importorskip("sklearn")
    monkeypatch.setattr(importance, "_has", lambda module: module != "sklearn" or has_sklearn)
    importance._estimated.cache_clear()

    found = importances_of(searched())

    importance._estimated.cache_clear()
    assert found is not None and found.estimator == (FANOVA if has_sklearn else PED_ANOVA)
    assert next(iter(found.shares)) == "alpha" and found.shares["alpha"] > 0.6
    assert sum(found.shares.values()) == pytest.approx(1)


def test_a_key_that_some_settings_lack_has_an_importance_too():
    records = [record(n, n % 3, alpha=n / 20, **({"k": n % 3} if n % 2 else {})) for n in range(20)]

    found = importances_of(Results("a search", ["alpha", "k"], records, mode="search"))

    assert found is not None and set(found.shares) == {"alpha", "k"}


def test_few_settings_or_one_key_have_no_importance():
    assert importances_of(searched(count=9)) is None
    one = searched()
    assert importances_of(Results("one", ["alpha"], one.records, mode="search")) is None


def test_the_figures_show_the_keys_that_decide_most_first():
    results = searched()

    panels = [axes for axes in slices(results).axes if axes.get_visible()]
    assert panels[0].get_xlabel() == "alpha" and len(panels) == 3
    assert {axes.get_xlabel(): axes.get_xscale() for axes in panels}["k"] == "log"
    surface = contours(results).axes[0]
    assert surface.get_xlabel() == "alpha" and surface.get_xscale() == "linear"
    assert surface.get_ylabel() == "k" and surface.get_yscale() == "log"
    assert len(importance_bars(results).axes[0].patches) == 3


def test_the_axis_of_a_key_is_logarithmic_where_it_was_searched_so_and_nowhere_else():
    def scales(results: Results) -> dict[str, str]:
        return {axes.get_xlabel(): axes.get_xscale() for axes in slices(results).axes if axes.get_visible()}

    results = searched()
    assert scales(replace(results, logarithmic=["alpha"])) == {
        "alpha": "log", "k": "linear", "word": "linear"
    }  # fmt: skip
    surface = contours(replace(results, logarithmic=["alpha"])).axes[0]
    assert (surface.get_xscale(), surface.get_yscale()) == ("log", "linear")
    narrow = [record(n, n % 5, alpha=0.5 + n / 40, k=n) for n in range(1, 20)]
    few = Results("a narrow one", ["alpha", "k"], narrow, mode="search", logarithmic=["alpha"])
    assert scales(few)["alpha"] == "log", "however narrow the range is"


def test_settings_on_a_line_have_no_contour():
    records = [record(n, n / 10, alpha=n / 10, k=n / 5) for n in range(12)]

    assert contours(Results("a line", ["alpha", "k"], records, mode="search")) is None


def told(results: Results, **gains: float) -> Results:
    """The same search with a verdict on splits of 400 examples, of which its best has so many more."""
    chance = np.random.default_rng(0)
    base = chance.random(400)
    candidates = []
    for place, setting in enumerate(results.ranked):
        hits = {split: base < (0.5 + gain if place == 0 else 0.5) for split, gain in gains.items()}
        outcomes = {split: Outcomes({"task": values}) for split, values in hits.items()}
        candidates.append(Candidate(setting.name, "merge", {}, outcomes))
    verdict = conclude(candidates, metric="hits", splits=tuple(gains))
    return replace(results, verdict=verdict)


@pytest.mark.parametrize(
    ("gain", "words"),
    [(0.3, "which is more than chance among the examples"), (0.005, "which cannot be told from chance")],
)
def test_a_gain_is_claimed_only_where_the_data_tell_it(gain, words):
    whole = searched(count=12)
    worst = frozenset(id(setting.records[0]) for setting in whole.ranked[-5:])
    note = gain_note(replace(told(whole, all=gain), at_random=worst))

    assert note is not None and words in note
    assert "than the best of the 5 that were drawn at random" in note
    assert note.endswith("A random search of as many trials was not run.")


def test_the_gain_says_that_dropped_trials_are_left_out():
    whole = searched(count=12)
    worst = frozenset(id(setting.records[0]) for setting in whole.ranked[-5:])
    dropped = Record("alpha=0.9", overrides=["alpha=0.9"], metric="hits", dropped=40)
    some = Results(whole.title, whole.swept, [*whole.records, dropped], mode="search", at_random=worst)

    assert "dropped" not in gain_note(replace(whole, at_random=worst))
    assert "chance. Trials that were dropped are left out. A random search" in gain_note(some)


def test_a_best_trial_that_is_worse_on_the_other_split_is_called_so():
    whole = searched(count=12)
    worst = frozenset(id(setting.records[0]) for setting in whole.ranked[-5:])
    note = gain_note(replace(told(whole, validation=0.3, test=-0.3), at_random=worst))

    assert note is not None and "there it is worse, by more than chance among the examples" in note
    assert "which is more than chance" not in note


def test_points_that_were_given_are_not_the_work_of_the_sampler():
    results = searched(drawn=5)
    ranked = [id(setting.records[0]) for setting in results.ranked]

    best = replace(results, at_random=frozenset(ranked[-3:]), given=frozenset(ranked[:2]))
    other = replace(results, at_random=frozenset(ranked[-3:]), given=frozenset(ranked[1:3]))

    assert "The best trial is one of the 2 with which the search began: the 55 that" in gain_note(best)
    assert "The best of the 55 trials that the sampler chose" in gain_note(other)


def test_without_outcomes_nothing_tells_whether_the_gain_is_chance():
    results = searched(drawn=5)
    ranked = [id(setting.records[0]) for setting in results.ranked]

    last = Results(
        "a search", results.swept, results.records, mode="search", at_random=frozenset(ranked[-3:])
    )
    first = Results(
        "a search", results.swept, results.records, mode="search", at_random=frozenset(ranked[:1])
    )

    assert "with one number a point, nothing tells whether that is chance" in gain_note(last)
    assert "The best trial is one of the 1 that were drawn at random" in gain_note(first)
    assert gain_note(Results("a search", results.swept, results.records, mode="search")) is None


def test_other_sweeps_have_no_notes_of_a_search():
    results = searched()

    assert search_notes(Results("a grid", results.swept, results.records)) == []
    assert any(
        note.startswith("importance for hits, relative to each other (") for note in search_notes(results)
    )


@pytest.mark.usefixtures("figures")
def test_a_search_of_the_demo_has_its_figures_and_says_what_it_gained(app, folder):
    words = ("recipe=ties", "alpha=interval(0,1.5)", "k=interval(0.05,1)", "output=none")
    outcome = app(
        "sweep=search", "sweep.trials=14", "sweep.batch=5", "sweep.options.n_startup_trials=5", *words
    )

    assert outcome.status == 0, outcome.err
    figures = {path.name for path in sweep_of(folder).glob("sweep*.png")}
    assert {"sweep.png", "sweep-importance.png", "sweep-slices.png", "sweep-contours.png"} <= figures
    said = " ".join(outcome.out.split())
    assert (
        "importance for accuracy, relative to each other (" in said and "5 that were drawn at random" in said
    )
    assert (
        "importance for accuracy, relative to each other (" in (sweep_of(folder) / "report.html").read_text()
    )

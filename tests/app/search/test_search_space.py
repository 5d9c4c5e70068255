"""What a search varies, and what samplers make of it, without a merge."""

import json
import random
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mecha_exp.app.search.samplers import SAMPLERS, Sampler
from mecha_exp.app.search.space import Dimension, Space, dimension_of
from mecha_exp.app.search.study import next_trials
from mecha_exp.app.search.study_file import STUDY_FILE, open_study_file
from mecha_exp.app.search.trials import Trial
from mecha_exp.app.words.quotes import parse

pytest.importorskip("optuna", minversion="4")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a=interval(0,1.5)", Dimension("a", low=0.0, high=1.5)),
        ("a=tag(log,interval(0.01,1))", Dimension("a", low=0.01, high=1.0, logarithmic=True)),
        ("a=int(interval(1,8))", Dimension("a", low=1, high=8, step=1, is_integer=True)),
        ("a=range(1,9,2)", Dimension("a", low=1, high=7, step=2, is_integer=True)),
        ("a=range(9,1,-4)", Dimension("a", low=5, high=9, step=4, is_integer=True)),
        ("a=range(0,1,0.25)", Dimension("a", low=0, high=0.75, step=0.25)),
        ("a=range(2,3)", Dimension("a", choices=("2",))),
        ("+a=x,y,x", Dimension("a", "+", ("x", "y"))),
        ("++a=0.10,0.1,2", Dimension("a", "++", ("0.1", "2"))),
    ],
)
def test_the_dimension_of_a_word(word: str, expected: Dimension):
    assert dimension_of(parse(word)) == expected


@example(low=-100.99999999988358, width=1.0, share=0.0)
@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-9, 1e6), share=st.floats(0, 1))
def test_a_text_is_within_the_bounds_and_stands_for_its_value(low, width, share):
    high = low + width
    if not low < high:
        return
    dimension = Dimension("a", low=low, high=high)
    text = dimension.text(min(max(low + share * width, low), high))

    assert low <= dimension.value(text) <= high
    assert dimension.text(dimension.value(text)) == text


SPACES = {
    "line": Space(
        (Dimension("a", low=0, high=1), Dimension("b", low=-1, high=1)), {"": {"a": "0", "b": "0"}}
    ),
    "finite": Space(
        (Dimension("a", choices=("x", "y")), Dimension("b", low=1, high=3, step=1, is_integer=True)),
        {"": {"a": "x", "b": "1"}},
    ),
    "branches": Space(
        (
            Dimension("recipe", choices=("ties", "slerp")),
            Dimension("a", low=0, high=1),
            Dimension("k", low=0.01, high=1, logarithmic=True),
        ),
        {"ties": {"recipe": "ties", "a": "0", "k": "1"}, "slerp": {"recipe": "slerp", "a": "0"}},
    ),
}


def searched(space: Space, sampler: Sampler, count: int, batch: int, score) -> list[Trial]:
    trials: list[Trial] = []
    while len(trials) < count:
        asked = next_trials(space, sampler, ["minimize"], trials, min(batch, count - len(trials)))
        written = json.loads(
            json.dumps([asdict(trial) for trial in asked])
        )  # as a start after a kill reads it
        trials += [Trial(t["parameters"], t["state"], (score(t["parameters"]),)) for t in written]
    return trials


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in ("gp",)])
@pytest.mark.parametrize("name", SPACES)
def test_no_setting_is_asked_for_twice_and_the_seed_decides_all(name: str, sampler: str):
    space = SPACES[name]
    count = min(12, int(space.size) if space.size < 100 else 12)
    score = lambda p: sum(v for v in p.values() if not isinstance(v, str))  # noqa: E731

    trials = searched(space, Sampler(sampler, 3), count, 4, score)

    texts = [tuple(space.setting(t.parameters).items()) for t in trials]
    assert len(set(texts)) == count
    assert searched(space, Sampler(sampler, 3), count, 4, score) == trials
    if name == "branches":
        assert all(("k" in t.parameters) == (t.parameters["recipe"] == "ties") for t in trials)


def test_the_size_of_a_space_counts_what_each_recipe_has():
    k = Dimension("k", low=1, high=3, step=1, is_integer=True)
    recipe = Dimension("recipe", choices=("ties", "slerp"))
    space = Space((recipe, k), {"ties": {"recipe": "ties", "k": "1"}, "slerp": {"recipe": "slerp"}})

    assert space.size == 4 == len(list(space.all_parameters()))
    assert SPACES["finite"].size == 6 and SPACES["line"].size == float("inf")


def test_a_study_file_that_breaks_in_the_middle_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    stored = open_study_file(tmp_path, "one", SPACES["line"], ["minimize"])
    trials = [Trial({"a": 0.5, "b": 0.0}, {}, (1.0,)), Trial({"a": 0.25, "b": 0.5}, {}, None)]
    stored.write(trials[:1])
    (tmp_path / STUDY_FILE).unlink()
    (tmp_path / STUDY_FILE).mkdir()

    stored.write(trials)
    stored.write(trials)

    assert [record.message[:34] for record in caplog.records] == ["the study is not written any more:"]


def sphere(parameters: dict, best: list[float]) -> float:
    return sum((parameters[f"b{i}"] - x) ** 2 for i, x in enumerate(best))


def wins(blocks: int, trials: int, seeds: range) -> int:
    """In how many seeds CMA-ES ends closer to the best strengths of blocks than random search."""
    dimensions = tuple(Dimension(f"b{i}", low=0, high=1) for i in range(blocks))
    space, won = Space(dimensions, {"": {d.key: "0" for d in dimensions}}), 0
    for seed in seeds:
        chance = random.Random(seed)
        score = partial(sphere, best=[chance.uniform(0.2, 0.8) for _ in range(blocks)])
        found = [
            min(t.values[0] for t in searched(space, Sampler(name, seed), trials, 20, score))
            for name in ("cmaes", "random")
        ]
        won += found[0] < found[1]
    return won


def test_cmaes_beats_random_search_on_a_quadratic():
    assert wins(blocks=5, trials=80, seeds=range(2)) == 2


@pytest.mark.heavy
def test_cmaes_over_twenty_blocks_beats_random_search_in_nine_of_ten_seeds():
    assert wins(blocks=20, trials=300, seeds=range(10)) >= 9

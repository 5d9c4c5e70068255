"""A sweep over recipes in which a hyperparameter means different things says so, before and after."""

import pytest

from mecha_exp.app.config.options import option_values
from mecha_exp.app.sweep.meanings import different_meanings

ALPHA = (
    "alpha means different things (in ties: strength of the merged task vector; in slerp: part of the way "
    "from a (0) to b (1)). Compare each recipe at its own best alpha, and not rows of equal alpha."
)


def meanings(key: str, *names: str) -> list[str]:
    return different_meanings([key], {name: option_values("recipe", name) for name in names})


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("alpha", ("ties", "task_arithmetic", "dare_ties", "della", "sce", "tsv_m")),
        ("k", ("ties", "dare_ties", "ties_extended")),
        ("weights", ("ties", "linear", "multislerp", "lines")),
        ("density", ("ties_weighted", "dare_ties", "breadcrumbs", "della")),
        ("alpha", ("ties", "nuslerp")),  # which has none
    ],
)
def test_what_means_the_same_is_not_mentioned(key, names):
    assert meanings(key, *names) == []


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("alpha", ("ties", "slerp")),
        ("alpha", ("ties", "weighted_sum", "crossover")),
        ("beta", ("lines", "extract")),
        ("gamma", ("breadcrumbs", "extract")),
        ("epsilon", ("della", "ram")),
    ],
)
def test_what_means_different_things_is_a_sentence_with_each_recipe(key, names):
    (note,) = meanings(key, *names)

    assert note.startswith(f"{key} means different things")
    assert all(name in note for name in names)


def test_plan_sweep_and_table_say_it(app, folder):
    words = ["recipe=ties,slerp", "alpha=0.3", "output=none", "evaluator=none", "name=two", "-m"]

    planned, swept, table = app("plan", *words[:-2], "-m"), app(*words), app("table", "two")

    assert meanings("alpha", "ties", "slerp") == [ALPHA]
    for outcome in (planned, swept, table):
        assert outcome.status == 0, outcome.err
        assert ALPHA in outcome.out

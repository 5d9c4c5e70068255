"""What a table says of columns that it leaves out, of directions that it does not know, and of spreads."""

import pytest

from mecha_exp.report import Results
from mecha_exp.report.table import MAX_CELL, distinct
from mecha_exp.runs.record import Record


@pytest.fixture
def swept(app, folder):
    """A sweep of two keys in the current folder."""
    outcome = app("alpha=0.3,0.5", "k=0.1,0.2", "output=none", "engine.workers=1", "name=two", "-m")

    assert outcome.status == 0, outcome.err
    return outcome


def test_a_table_says_what_it_leaves_out_and_what_it_does_not_know(app, swept, monkeypatch):
    shown = app("table", "two", *(word for m in MANY for word in ("--metric", m)), "--direction", "minimize")
    by_alpha = app("table", "two", "--by", "alpha")
    unknown = app("table", "two", "--metric", "weights/cosine/base")
    known = app("table", "two", "--metric", "accuracy")

    assert "more columns: sweep.csv" in shown.out
    assert "±" not in by_alpha.out and " to 0." in by_alpha.out
    assert unknown.status == 1
    assert "Add --direction maximize or --direction minimize." in unknown.err
    assert known.status == 0 and " *" in known.out


MANY = [
    f"weights/{what}/{model}"
    for what in ("distance", "cosine", "relative_change")
    for model in ("base", "expert_0_3", "expert_4_6", "expert_7_9")
]


def test_rows_that_merge_different_inputs_say_which():
    records = [
        Record(name, parameters={f"input/{model}": "x" for model in inputs})
        for name, inputs in (("recipe=ties", "abc"), ("recipe=slerp", "bc"), ("recipe=dare", "abc"))
    ]

    assert Results("t", ["recipe"], records).notes == [
        "inputs of recipe=ties, recipe=dare: a, b, c",
        "inputs of recipe=slerp: b, c",
    ]
    assert Results("t", ["recipe"], records[::2]).notes == []


def test_no_two_values_look_alike():
    texts = [
        f"[{','.join(f'expert_{i}_of_many_experts.safetensors' for i in s)}]" for s in ("012", "02", "12")
    ]

    assert len(set(distinct(texts))) == 3
    assert all(len(text) <= MAX_CELL for text in distinct(texts))


def test_learned_weights_are_a_method_beside_the_recipe_whose_weights_they_are():
    records = [
        Record(
            name=str(number),
            metrics={"accuracy": accuracy},
            overrides=[f"recipe={recipe}", f"++learned={learned}", f"alpha={number}"],
            metric="accuracy",
            direction="maximize",
        )
        for number, (recipe, learned, accuracy) in enumerate(
            [
                ("task_arithmetic", "nothing", 0.5),
                ("task_arithmetic", "nothing", 0.6),
                ("task_arithmetic", "entropy/key", 0.8),
                ("task_arithmetic", "entropy/key", 0.7),
                ("ties", "nothing", 0.4),
            ]
        )
    ]

    results = Results("t", ["recipe", "learned", "alpha"], records)

    assert [results.method_of(setting) for setting in results.chosen_settings] == [
        "task_arithmetic, entropy/key",
        "task_arithmetic",
        "ties",
    ]
    assert [setting.values["alpha"] for setting in results.chosen_settings] == [2, 1, 4]

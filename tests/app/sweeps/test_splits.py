"""A sweep is chosen on validation; its chosen points and inputs are measured on test, once."""

import csv
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mecha_exp import Context, Outcomes, evaluator
from mecha_exp.errors import ConfigError
from mecha_exp.report.protocol import current
from mecha_exp.report.results import Results
from mecha_exp.runs.outcomes import outcomes_of_sweep
from mecha_exp.runs.record import Record

NAMED = ("evaluator.name=test_parts", "evaluator.weight_stats=false", "-m")


@pytest.fixture
def calls() -> Counter[str]:
    """How often the evaluator `test_parts` measured each split."""
    return Counter()


@pytest.fixture
def measure_by(calls: Counter[str]) -> Callable[..., None]:
    """Registers `test_parts`, whose outcomes come from the weights and from labels."""

    def register(labels: dict[str, np.ndarray], version: int = 1) -> None:
        @evaluator("test_parts", metric="hits", splits=("validation", "test"), version=version)
        def parts(state_dict, *, split: str, context: Context):
            calls[split] += 1
            weights = state_dict["fc1.weight"].double().flatten()[: labels[split].size].numpy()
            right = (weights > 0) == labels[split]
            return Outcomes({"first": right[::2], "second": right[1::2]})

    return register


@pytest.fixture
def labels() -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    return {split: chance.random(400) > 0.5 for split in ("validation", "test")}


def sweeps(folder: Path) -> list[Path]:
    return sorted((folder / "outputs/multiruns").iterdir())


def rows(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def reported(sweep: Path) -> list[str]:
    return [row["name"] for row in rows(sweep) if row["test/hits"]]


def test_the_best_point_of_each_recipe_and_the_inputs_are_measured_on_test_once(
    app, folder, measure_by, labels, calls, passes_run
):
    measure_by(labels)
    command = ("recipe=ties,task_arithmetic", "alpha=0.2,0.6,1.0", "output=none", *NAMED)

    outcome = app(*command)

    assert outcome.status == 0, outcome.err
    (sweep,) = sweeps(folder)
    points = [row for row in rows(sweep) if row["status"] == "FINISHED"]
    best = {
        recipe: max((p for p in points if p["recipe"] == recipe), key=lambda p: float(p["hits"]))["name"]
        for recipe in ("ties", "task_arithmetic")
    }
    inputs = ["base", "expert_0_3", "expert_4_6", "expert_7_9"]
    assert sorted(reported(sweep)) == sorted([*best.values(), *inputs])
    assert calls == {"validation": 6 + 4, "test": 2 + 4}
    assert passes_run == [6, 2]
    assert "merging the chosen points once more (2)" in outcome.out
    assert "hits: sorted and chosen on validation; test/hits is that of the chosen points" in outcome.out

    again = app(*command)
    assert "nothing to do" in again.out
    assert calls == {"validation": 10, "test": 6}
    assert passes_run == [6, 2]


def test_other_test_labels_change_no_choice(app, folder, measure_by, labels):
    command = ("alpha=0.2,0.4,0.6,0.8,1.0", "store=null", "output=none", *NAMED)
    chosen = []
    for seed in range(3):
        test = np.random.default_rng(seed).permutation(labels["test"])
        measure_by({"validation": labels["validation"], "test": test})
        assert app(*command, f"hydra.sweep.dir=sweep{seed}").status == 0
        chosen.append(
            [
                (row["name"], row["hits"], bool(row["test/hits"]))
                for row in rows(folder / f"sweep{seed}")
                if row["status"] == "FINISHED"
            ]
        )

    assert chosen[0] == chosen[1] == chosen[2]
    assert sum(is_reported for _, _, is_reported in chosen[0]) == 1


def test_a_model_that_was_kept_is_not_merged_again(app, measure_by, labels, passes_run):
    measure_by(labels)

    assert app("alpha=0.2,0.6", *NAMED).status == 0

    assert passes_run == [2]


def test_the_outcomes_of_a_sweep_agree_with_its_numbers(app, folder, measure_by, labels):
    measure_by(labels)
    app("alpha=0.2,0.6", "output=none", *NAMED)
    (sweep,) = sweeps(folder)

    models = {model.name: model.by_metric["hits"] for model in outcomes_of_sweep(sweep)}

    for row in rows(sweep):
        for split, prefix in (("validation", ""), ("test", "test/")):
            stated = row[f"{prefix}hits/first"]
            assert (split in models[row["name"]]) == bool(stated)
            if stated:
                assert float(stated) == models[row["name"]][split].values["first"].mean()


def test_without_splits_the_table_says_so(app, folder):
    evaluator("test_whole", metric="x")(lambda state_dict: {"x": float(state_dict["fc1.weight"].sum())})

    outcome = app("alpha=0.2,0.6", "output=none", "evaluator.name=test_whole", "-m")

    assert outcome.status == 0, outcome.err
    assert "x: chosen and reported on the same data" in outcome.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("evaluator.split=test", "alpha=0.2,0.6"), "evaluator.split=test: a sweep is chosen on validation"),
        (("evaluator.timeout=10,20",), "evaluator.timeout is swept, and a table holds the numbers of one"),
    ],
)
def test_a_sweep_that_would_mix_evaluations_is_refused(app, measure_by, labels, words, message, passes_run):
    measure_by(labels)

    outcome = app(*words, "output=none", *NAMED)

    assert outcome.status == 1
    assert message in outcome.err
    assert passes_run == []


def test_another_evaluator_measures_points_and_inputs_anew(app, folder, measure_by, labels, calls):
    measure_by(labels)
    app("alpha=0.2,0.6", *NAMED)
    before = rows(sweeps(folder)[0])
    calls.clear()
    measure_by({split: ~values for split, values in labels.items()}, version=2)

    outcome = app("alpha=0.2,0.6", *NAMED)

    after = {row["name"]: row for row in rows(sweeps(folder)[-1])}
    assert calls == {"validation": 6, "test": 5}
    for row in before:
        assert float(after[row["name"]]["hits"]) == pytest.approx(1 - float(row["hits"]))
    (value,) = [
        float(row["test/hits"]) for row in after.values() if row["status"] == "FINISHED" and row["test/hits"]
    ]
    assert f"has hits {value:.4g} on 'test'" in " ".join(outcome.out.split())  # by the outcomes of this start


@pytest.mark.parametrize(("choice", "merged"), [("evaluate", [2]), ("always", [2, 2])])
def test_rerun_measures_points_and_inputs_anew(app, measure_by, labels, calls, passes_run, choice, merged):
    measure_by(labels)
    app("alpha=0.2,0.6", *NAMED)
    calls.clear()

    assert app("alpha=0.2,0.6", f"rerun={choice}", *NAMED).status == 0

    assert calls == {"validation": 2 + 4, "test": 1 + 4}
    assert passes_run == merged


def test_a_single_run_measures_another_split_where_it_is_asked_for(app, folder, measure_by, labels, calls):
    measure_by(labels)

    assert app("output=none", "evaluator.name=test_parts", "evaluator.split=test").status == 0

    (run,) = (folder / "outputs/runs").iterdir()
    metrics = json.loads((run / "metrics.json").read_text())
    assert {"hits", "hits/first", "test/hits", "test/hits/first"} <= metrics.keys()
    assert calls == {"validation": 5, "test": 5}


def test_the_failure_of_one_evaluator_does_not_refuse_another(app):
    def fails(state_dict):
        raise RuntimeError("\x1b[31mno")

    evaluator("test_fails", metric="x")(fails)
    evaluator("test_works", metric="x")(lambda state_dict: {"x": 1.0})
    command = ("alpha=0.2,0.6", "output=none", "-m")

    failed = app(*command, "evaluator.name=test_fails")
    refused = app(*command, "evaluator.name=test_fails", "rerun=never")
    other = app(*command, "evaluator.name=test_works", "rerun=never")
    again = app(*command, "evaluator.name=test_fails", "rerun=never")

    assert (failed.status, refused.status, other.status, again.status) == (1, 1, 0, 1)
    assert "the evaluator 'test_fails' failed: RuntimeError" in again.err
    assert "\x1b" not in failed.out + failed.err
    assert "rerun=failed tries it again" in refused.err
    assert "rerun=failed tries it again" in again.err


def test_experts_that_a_configuration_names_give_the_normalised_score(app, folder, measure_by, labels):
    measure_by(labels)
    named = "models.expert_of={first: base, second: expert_0_3}"

    assert app("output=none", "evaluator.name=test_parts", named).status == 0

    (run,) = (folder / "outputs/runs").iterdir()
    record = Record.load(run)
    base, expert = record.references["base"], record.references["expert_0_3"]
    first, second = (record.metrics[f"hits/{task}"] for task in ("first", "second"))
    expected = (first / base["hits/first"] + second / expert["hits/second"]) / 2
    assert record.metrics["hits/normalised"] == pytest.approx(expected)


def test_an_expert_of_no_task_is_an_error(app, measure_by, labels):
    measure_by(labels)

    outcome = app("output=none", "evaluator.name=test_parts", "models.expert_of={frist: base}")

    assert outcome.status == 1
    assert "models.expert_of.frist: the evaluator measures no such task. Did you mean 'first'?" in outcome.err


def record(name: str, value: float, key: str, ended: int = 0) -> Record:
    return Record(
        name, metrics={"hits": value, "time/x": 1.0}, metric="hits", evaluations={"": key}, ended=ended
    )


def test_no_table_mixes_two_evaluations():
    one, other = record("a", 0.5, "parts-1"), record("b", 0.6, "parts-2")

    with pytest.raises(ConfigError, match=r"hits was measured in two ways \(parts-1 and parts-2"):
        Results("t", ["alpha"], [one, other])
    Results("t", ["alpha"], [one, replace(other, evaluations={"": "parts-1"})])
    Results("t", ["alpha"], [one, replace(other, metrics={"perplexity": 3.0, "time/x": 2.0})])


def test_points_of_an_earlier_version_of_the_evaluator_are_not_shown():
    records = [
        record("a", 0.5, "parts-2", 20),
        record("b", 0.9, "parts-1", 10),
        record("c", 0.4, "parts-2", 30),
    ]

    results = Results("t", ["alpha"], current(records))

    assert [r.name for r in results.finished] == ["a", "c"]
    assert "measures it again" in str(results.records[1].error)


def test_the_line_of_a_point_says_how_long_its_inputs_took(app):
    @evaluator("test_slow", metric="m")
    def slow(state_dict):
        time.sleep(0.2)
        return {"m": 1.0}

    outcome = app("evaluator.name=test_slow", "alpha=0.3,0.5", "output=none", "-m")

    first, second, *_ = outcome.out.splitlines()
    assert re.search(r"alpha=0\.3: m 1, \d+\.\d s, of which \d+\.\d s for the inputs$", first)
    assert "for the inputs" not in second

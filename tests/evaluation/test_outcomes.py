"""Outcomes by example: what is accepted, what follows from them, and their tables on disk."""

import math
import pickle
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from mecha_exp import EvaluationError, Outcomes
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.outcome_table import decode, encode
from mecha_exp.runs.outcomes import (
    INPUT,
    POINT,
    MeasuredOutcomes,
    collect_outcomes,
    models_in,
    outcomes_of_sweep,
    outcomes_so_far,
    read_outcomes,
    write_outcomes,
)
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep

TWO = Outcomes({"cats": [1, 1, 0, 1], "dogs": [0, 1]})


def test_the_metric_is_the_mean_over_tasks_and_not_over_examples():
    assert TWO.means("accuracy") == {"accuracy": 0.625, "accuracy/cats": 0.75, "accuracy/dogs": 0.5}


def test_further_metrics_come_last():
    outcomes = Outcomes({"a": [1.0]}, metrics={"loss": 2})

    assert list(outcomes.means("accuracy").items()) == [("accuracy", 1.0), ("accuracy/a", 1.0), ("loss", 2.0)]


def test_an_outcome_that_is_nan_makes_the_metric_nan():
    assert math.isnan(Outcomes({"a": [1, math.nan], "b": [1]}).means("m")["m"])


def test_examples_have_positions_as_names_and_are_their_own_clusters():
    outcomes = Outcomes(
        {"a": [1, 0], "b": [1, 1]}, clusters={"a": ["photo", "photo"]}, examples={"b": [7, 9]}
    )

    assert {task: names.tolist() for task, names in outcomes.examples.items()} == {
        "a": ["0", "1"],
        "b": ["7", "9"],
    }
    assert {task: names.tolist() for task, names in outcomes.clusters.items()} == {
        "a": ["photo", "photo"],
        "b": ["7", "9"],
    }


@pytest.mark.parametrize(
    "array", [[True, False], torch.tensor([True, False]), np.array([1, 0], np.int8), (1.0, 0.0)]
)
def test_any_array_of_numbers_is_taken(array):
    assert Outcomes({"a": array}).values["a"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("values", "more", "message"),
    [
        ({}, {}, "there is no task. Give the values of at least one"),
        ({"a": []}, {}, r"the task 'a' needs one value an example, not shape \[0\]"),
        ({"a": [[1, 0]]}, {}, r"the task 'a' needs one value an example, not shape \[1, 2\]"),
        ({"a": 1.0}, {}, r"the task 'a' needs one value an example, not shape \[\]"),
        ({"a": ["x"]}, {}, "the values of the task 'a' are not numbers"),
        ({"a": [1]}, {"examples": {"b": ["0"]}}, "examples name the task 'b', which has no values"),
        ({"a": [1]}, {"clusters": {"a": ["0", "1"]}}, "2 clusters for 1 value of the task 'a'"),
        (
            {"a": [1, 0]},
            {"examples": {"a": ["x", "x"]}},
            "the examples of the task 'a' have names that repeat",
        ),
    ],
)
def test_what_are_no_outcomes_is_refused(values, more, message):
    with pytest.raises(EvaluationError, match=f"outcomes: {message}"):
        Outcomes(values, **more)


@st.composite
def outcomes(draw) -> Outcomes:
    names = st.text(min_size=1, max_size=6)
    values: dict[str, list[float]] = {}
    examples: dict[str, list[str]] = {}
    clusters: dict[str, list[str]] = {}
    for task in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        examples[task] = draw(st.lists(names, min_size=1, max_size=5, unique=True))
        size = len(examples[task])
        values[task] = draw(st.lists(st.floats(), min_size=size, max_size=size))
        clusters[task] = draw(st.lists(names, min_size=size, max_size=size))
    return Outcomes(values, examples=examples, clusters=clusters)


@given(outcomes())
def test_outcomes_are_read_as_they_were_written(some):
    assert decode(encode({"": some}))[""].equals(some)
    assert pickle.loads(pickle.dumps(some)).equals(some)


@given(outcomes(), outcomes())
def test_outcomes_of_further_metrics_are_read_under_their_names(main, further):
    for written in ({"": main, "kl": further}, {"score/a": main, "score/b": further}):
        again = decode(encode(written))

        assert list(again) == list(written)
        assert all(again[metric].equals(written[metric]) for metric in written)


@given(st.lists(outcomes(), min_size=1, max_size=4))
def test_a_file_has_the_outcomes_of_all_models_in_their_order(tmp_path_factory, several):
    path = tmp_path_factory.mktemp("outcomes") / "outcomes.parquet"
    parts = [
        MeasuredOutcomes(INPUT if n == 1 else POINT, None if n == 1 else n, f"m{n}", "accuracy", "test", part)
        for n, part in enumerate(several)
    ]

    write_outcomes(parts, path)

    again = read_outcomes(path)
    labels = [(p.role, p.point, p.name, p.metric, p.split) for p in again]
    assert labels == [(p.role, p.point, p.name, p.metric, p.split) for p in parts]
    assert all(a.outcomes.equals(b.outcomes) for a, b in zip(again, parts, strict=True))


def test_pandas_reads_them(tmp_path):
    path = tmp_path / "outcomes.parquet"
    write_outcomes([MeasuredOutcomes(POINT, 3, "alpha=0.5", "accuracy", "validation", TWO)], path)

    table = pandas.read_parquet(path)

    columns = ["role", "point", "name", "metric", "split", "experts", "task", "example", "cluster", "value"]
    assert list(table.columns) == columns
    assert table.value.tolist() == [1, 1, 0, 1, 0, 1]
    assert table.groupby("task", observed=True).value.mean().to_dict() == {"cats": 0.75, "dogs": 0.5}


def test_hits_of_719_images_take_few_bytes():
    hits = np.random.default_rng(0).integers(0, 2, 719)

    assert len(encode({"": Outcomes({"a": hits})})) < 5000


def test_models_have_their_outcomes_by_metric_and_split():
    parts = [
        MeasuredOutcomes(POINT, 0, "p", "accuracy", "validation", TWO),
        MeasuredOutcomes(INPUT, None, "base", "accuracy", "validation", TWO),
        MeasuredOutcomes(POINT, 0, "p", "accuracy", "test", TWO),
    ]

    point, base = models_in(parts)

    assert (point.role, point.point, list(point.by_metric["accuracy"])) == (POINT, 0, ["validation", "test"])
    assert (base.role, base.name, list(base.by_metric["accuracy"])) == (INPUT, "base", ["validation"])


def test_a_sweep_has_each_input_once_and_tells_others_of_its_name_apart(tmp_path):
    other = Outcomes({"cats": [0, 0, 0, 0], "dogs": [0, 1]})
    for number, base in enumerate((TWO, TWO, other)):
        (tmp_path / str(number)).mkdir()
        parts = [
            MeasuredOutcomes(POINT, None, f"alpha={number}", "accuracy", "validation", TWO),
            MeasuredOutcomes(INPUT, None, "base", "accuracy", "validation", base),
        ]
        write_outcomes(parts, tmp_path / str(number) / "outcomes.parquet")
    (tmp_path / "3").mkdir()  # without outcomes

    assert collect_outcomes({tmp_path / str(n): n for n in range(4)}, tmp_path / "outcomes.parquet")

    models = outcomes_of_sweep(tmp_path)
    assert [(m.role, m.point, m.name) for m in models] == [
        (POINT, 0, "alpha=0"),
        (INPUT, None, "base"),
        (POINT, 1, "alpha=1"),
        (POINT, 2, "alpha=2"),
        (INPUT, None, "base (2)"),
    ]
    assert models[-1].by_metric["accuracy"]["validation"].equals(other)


def test_names_of_other_lengths_are_not_taken_for_each_other(tmp_path):
    measured = [
        Outcomes({"t": [0, 1]}, examples={"t": ["a", "b"]}),
        Outcomes({"t": [1]}, examples={"t": ["ab"]}),
    ]
    for number, outcomes in enumerate(measured):
        part = MeasuredOutcomes(POINT, None, f"alpha={number}", "accuracy", "validation", outcomes)
        (tmp_path / str(number)).mkdir()
        write_outcomes([part], tmp_path / str(number) / "outcomes.parquet")

    collect_outcomes({tmp_path / str(n): n for n in range(2)}, tmp_path / "outcomes.parquet")

    for model, outcomes in zip(outcomes_of_sweep(tmp_path), measured, strict=True):
        assert model.by_metric["accuracy"]["validation"].equals(outcomes)


def test_an_input_of_several_sets_of_experts_is_there_once_for_each(tmp_path):
    for number, experts in enumerate((0, 1, 0)):
        (tmp_path / str(number)).mkdir()
        part = MeasuredOutcomes(INPUT, None, "expert", "accuracy", "validation", TWO, experts)
        write_outcomes([part], tmp_path / str(number) / "outcomes.parquet")

    collect_outcomes({tmp_path / str(n): n for n in range(3)}, tmp_path / "outcomes.parquet")

    assert [(m.name, m.experts) for m in outcomes_of_sweep(tmp_path)] == [("expert", 0), ("expert", 1)]


def test_outcomes_that_groups_of_rows_cut_are_read_whole(tmp_path):
    path = tmp_path / "outcomes.parquet"
    measured = [MeasuredOutcomes(POINT, n, f"p{n}", "accuracy", "validation", TWO) for n in range(3)]
    write_outcomes(measured, path)
    parquet.write_table(parquet.read_table(path), path, row_group_size=4)

    assert parquet.ParquetFile(path).num_row_groups > 3
    for part, expected in zip(read_outcomes(path), measured, strict=True):
        assert (part.point, part.name) == (expected.point, expected.name)
        assert part.outcomes.equals(TWO)


def test_a_file_without_the_number_of_the_set_is_read(tmp_path):
    path = tmp_path / "outcomes.parquet"
    write_outcomes([MeasuredOutcomes(POINT, 0, "p", "accuracy", "validation", TWO)], path)
    parquet.write_table(parquet.read_table(path).drop_columns(["experts"]), path)

    (model,) = outcomes_of_sweep(tmp_path)

    assert model.experts is None and model.by_metric["accuracy"]["validation"].equals(TWO)


def test_outcomes_of_a_point_that_was_measured_again_replace_the_collected_ones(tmp_path):
    other = Outcomes({"cats": [0, 0, 0, 0], "dogs": [0, 1]})
    sweep, point = Sweep("one", [], [], 1, complete=True), tmp_path / "0"
    Record("alpha=0").save(point)
    for outcomes in (TWO, other):
        part = MeasuredOutcomes(POINT, None, "alpha=0", "accuracy", "validation", outcomes)
        write_outcomes([part], point / "outcomes.parquet")
        if outcomes is TWO:
            collect_outcomes({point: 0}, tmp_path / "outcomes.parquet")

    (model,) = outcomes_so_far(sweep, tmp_path, sweep.records(tmp_path))

    assert model.by_metric["accuracy"]["validation"].equals(other)


def test_without_outcomes_there_is_no_file(tmp_path):
    path = tmp_path / "outcomes.parquet"
    write_outcomes([MeasuredOutcomes(POINT, None, "p", "m", "all", TWO)], path)

    assert not write_outcomes([], path)

    assert not path.exists()
    assert outcomes_of_sweep(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not a table at all"])
def test_a_damaged_file_is_a_clear_error(tmp_path: Path, content):
    (tmp_path / "outcomes.parquet").write_bytes(content)

    with pytest.raises(ConfigError, match=r"outcomes\.parquet cannot be read as outcomes"):
        outcomes_of_sweep(tmp_path)
    with pytest.raises(ValueError, match="arquet"):
        decode(content)

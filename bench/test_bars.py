"""The benchmark says which bars are met, by how much one is missed, and what it could not tell."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mecha_exp as mx
from bench.bars import Bar, Reached, verdict
from bench.cases import OF_STATISTICS, by_name, measured_methods, with_data
from bench.peer_cases import BY_METHOD, MERGEKIT, SD_MECHA
from bench.report import as_for_users
from bench.rows import CASES, chosen_cases
from bench.statistics_files import make_statistics

ONE = Reached(seconds=2.0, peak=300_000_000, floor=1.0)


@pytest.mark.parametrize(
    ("bar", "reached", "said"),
    [
        (Bar(), ONE, "-"),
        (Bar(of_floor=2, megabytes=300), ONE, "met"),
        (Bar(of_floor=1.7, megabytes=300), ONE, "missed: 2.00 instead of 1.7 times the floor"),
        (
            Bar(of_floor=1.7, megabytes=250),
            ONE,
            "missed: 2.00 instead of 1.7 times the floor, 300 instead of 250 MB",
        ),
        (Bar(faster=12, megabytes=600), ONE, "met; not measured: 12 times sd-mecha"),
        (Bar(faster=12), ONE, "not measured: 12 times sd-mecha"),
        (Bar(faster=12), Reached(2.0, 0, 1.0, peers={"sd-mecha": 24.0}), "met"),
        (Bar(faster=12), Reached(2.0, 0, 1.0, peers={"sd-mecha": 23.0}), "missed: 11.5 of 12 times sd-mecha"),
        (Bar(), Reached(2.0, 0, 1.0, peers={"sd-mecha": 3.0, "mergekit": 2.0}), "met"),
        (
            Bar(),
            Reached(2.0, 0, 1.0, peers={"sd-mecha": 3.0, "mergekit": 1.9}),
            "missed: slower than mergekit",
        ),
        (Bar(seconds=25), Reached(24.0, 0, 1.0), "met"),
        (Bar(seconds=25), Reached(26.04, 0, 1.0), "missed: 26.0 instead of 25 s"),
        (Bar(copies=1.5), Reached(4.0, 0, 2.5, copying=2.0, point=1.0), "met"),
        (
            Bar(copies=1.5),
            Reached(4.1, 0, 2.5, copying=2.0, point=1.0),
            "missed: 4.10 instead of 4.00 s",
        ),
        (Bar(copies=1.5), ONE, "not measured: one point and 1.5 times the copying"),
        (Bar(milliseconds=2), Reached(100.0, 0, 1.0, keys=100_000), "met"),
        (
            Bar(milliseconds=2),
            Reached(300.0, 0, 1.0, keys=100_000),
            "missed: 3.00 instead of 2 ms a key",
        ),
    ],
)
def test_what_a_row_reaches_is_said(bar, reached, said):
    assert verdict(bar, reached) == said


def test_programs_are_measured_with_what_python_has_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")

    assert "PYTHONDONTWRITEBYTECODE" not in as_for_users()
    assert as_for_users()["SOMETHING_ELSE"] == "kept"


def test_every_row_is_one_that_can_be_asked_for():
    rows = {case.name: case for case in chosen_cases(["all"])}

    assert {case.name for case in CASES} - {"sdxl"} <= rows.keys()
    assert {"della", "iso_c", "ties_sum", "rotate"} <= measured_methods().keys()
    assert not {"rebasin", "norm", "fisher", "get_dtype"} & measured_methods().keys()
    assert all(rows[BY_METHOD + name].inputs == count for name, count in measured_methods().items())


def test_each_work_of_a_peer_is_that_of_a_row_beside_ours():
    rows = [case for case in chosen_cases(["all"]) if not case.alone]
    tools = {case.work or case.name: case.tools for case in rows}

    assert {name for name, who in tools.items() if "sd-mecha" in who} == SD_MECHA.keys()
    assert {name for name, who in tools.items() if "mergekit" in who} == MERGEKIT.keys()
    assert all("mecha_exp" in who for who in tools.values())


@pytest.mark.parametrize("name", measured_methods())
def test_each_method_of_the_bench_can_be_called_as_it_is_there(name):
    inputs = [mx.model({"w": torch.full((4, 3), float(i))}) for i in range(measured_methods()[name])]

    with mx.plan([mx.Job(by_name(name, inputs), {})]) as planned:
        assert planned.layouts[0]["w"][1] == (4, 3)


@pytest.mark.parametrize(("name", "kind"), OF_STATISTICS.items())
def test_rows_with_data_merge_drawn_statistics(tmp_path: Path, name: str, kind: str):
    shapes = {"linear.weight": (4, 3), "conv.weight": (2, 3, 3, 3), "norm.weight": (4,)}
    (case,) = chosen_cases([name])
    models = [tmp_path / f"{number}.safetensors" for number in range(case.inputs)]
    for number, path in enumerate(models):
        save_file({key: torch.full(shape, float(number)) for key, shape in shapes.items()}, path)

    files = make_statistics(models[-2:], kind)
    made = mx.merge(with_data(name, [str(path) for path in (*models, *files)]))

    assert {key: tuple(tensor.shape) for key, tensor in made.items()} == shapes
    assert all(bool(tensor.isfinite().all()) for tensor in made.values())
    assert case in chosen_cases(["data"])

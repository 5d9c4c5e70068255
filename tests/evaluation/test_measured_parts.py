"""A measurement in parts shows its progress, and goes on after an interrupt where it stopped."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation import Context

PARTS = [range(3), range(3, 6), range(6, 7)]


class Meter:
    """Measures parts, and is interrupted before one of them."""

    def __init__(self, stop: int | None = None) -> None:
        self.measured: list[Sequence[int]] = []
        self._stop = stop

    def __call__(self, part: Sequence[int]) -> list[float]:
        if len(self.measured) == self._stop:
            raise KeyboardInterrupt
        self.measured.append(part)
        return [math.sqrt(number) for number in part]


WHOLE = [[math.sqrt(number) for number in part] for part in PARTS]


def test_the_numbers_of_each_part_are_returned():
    assert Context().in_parts("rows", PARTS, Meter()) == WHOLE
    assert Context().in_parts("rows", [], Meter()) == []


def test_a_start_after_an_interrupt_measures_what_is_left(tmp_path: Path):
    context = Context(kept=tmp_path / "point" / "evaluation.partial")
    with pytest.raises(KeyboardInterrupt):
        context.in_parts("rows", PARTS, Meter(stop=2))

    meter = Meter()

    assert context.in_parts("rows", PARTS, meter) == WHOLE
    assert meter.measured == [PARTS[2]]


def test_a_line_that_a_kill_has_cut_is_measured_again(tmp_path: Path):
    file = tmp_path / "evaluation.partial"
    Context(kept=file).in_parts("rows", PARTS, Meter())
    whole = file.read_bytes()

    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert Context(kept=file).in_parts("rows", PARTS, Meter()) == WHOLE


@pytest.mark.parametrize(
    "line",
    ["", "null", "[]", '{"work": "rows"}', '{"work": "rows", "of": 3, "part": 9, "values": [1]}', "\0\xff"],
)
def test_lines_that_are_none_are_left_out(tmp_path: Path, line: str):
    file = tmp_path / "evaluation.partial"
    file.write_text(line + "\n", encoding="latin-1")

    assert Context(kept=file).in_parts("rows", PARTS, Meter()) == WHOLE


def test_kinds_of_parts_are_told_apart_by_their_names_and_numbers(tmp_path: Path):
    context = Context(kept=tmp_path / "evaluation.partial")
    context.in_parts("rows of a", PARTS, Meter())

    for work, parts in (("rows of b", PARTS), ("rows of a", PARTS[:2])):
        meter = Meter()
        context.in_parts(work, parts, meter)
        assert meter.measured == parts


def test_two_kinds_of_parts_by_one_name_are_refused(tmp_path: Path):
    context = Context(kept=tmp_path / "evaluation.partial")
    context.in_parts("rows", PARTS, Meter())

    with pytest.raises(
        EvaluationError, match=r"in_parts\('rows', \.\.\.\) is called twice .* 'rows of TASK'"
    ):
        context.in_parts("rows", PARTS, lambda part: [0.0 for _ in part])


def test_what_is_kept_of_some_examples_is_recalled_for_these_alone(tmp_path: Path):
    kept = tmp_path / "evaluation.partial"
    Context(kept=kept, among="a").in_parts("rows", PARTS, Meter())

    for among, measured in (("a", []), ("b", PARTS), ("", PARTS)):
        meter = Meter()
        assert Context(kept=kept, among=among).in_parts("rows", PARTS, meter) == WHOLE
        assert meter.measured == measured


def test_parts_with_names_are_recalled_whichever_others_there_are(tmp_path: Path):
    kept, names = tmp_path / "evaluation.partial", ["first", "second", "third"]
    Context(kept=kept, among="a").in_parts("rows", PARTS[1:2], Meter(), names=names[1:2])
    meter = Meter()

    assert Context(kept=kept).in_parts("rows", PARTS, meter, names=names) == WHOLE
    assert meter.measured == [PARTS[0], PARTS[2]]


def test_progress_counts_examples_from_those_that_are_kept(tmp_path: Path):
    kept = tmp_path / "evaluation.partial"
    with pytest.raises(KeyboardInterrupt):
        Context(kept=kept).in_parts("rows", PARTS, Meter(stop=1))
    shown: list[tuple[str, int, int]] = []

    Context(kept=kept, report=lambda *done: shown.append(done)).in_parts("rows", PARTS, Meter())

    assert shown == [("rows", 3, 7), ("rows", 6, 7), ("rows", 7, 7)]


def test_a_file_that_cannot_be_written_costs_no_result(tmp_path: Path):
    (tmp_path / "file").write_text("")

    assert Context(kept=tmp_path / "file" / "partial").in_parts("rows", PARTS, Meter()) == WHOLE

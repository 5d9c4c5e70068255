"""Paths in the tables of the terminal."""

import io

import pytest
from rich.console import Console

from mecha_exp.engine.options import SETTINGS
from mecha_exp.terminal import bars, console, pace

PATH = "/home/a researcher/models of this year/by method/expert.safetensors"


@pytest.mark.parametrize("width", [20, 25, 30, 40, 60])
def test_a_path_is_shortened_in_its_middle(width):
    shortened = console.shortened_path(PATH, width)

    beginning, ending = shortened.split("…")
    assert len(shortened) == width
    assert PATH.startswith(beginning)
    assert PATH.endswith(ending)
    assert ending.endswith("/expert.safetensors")


def test_a_path_that_fits_stays():
    assert console.shortened_path(PATH, len(PATH)) == PATH


@pytest.mark.parametrize("width", [1, 5, 19])
def test_the_file_s_name_stays_whole_however_narrow_the_column(width):
    assert console.shortened_path(PATH, width) == "…/expert.safetensors"


@pytest.mark.parametrize("path", ["/a", "a.safetensors", ""])
def test_a_path_is_never_made_longer(path):
    assert console.shortened_path(path, 1) == path


def printed(monkeypatch: pytest.MonkeyPatch, width: int, is_terminal: bool) -> list[str]:
    output = io.StringIO()
    screen = Console(file=output, width=width, force_terminal=is_terminal, highlight=False, no_color=True)
    monkeypatch.setattr(console, "stdout", screen)
    table = console.make_table("input", "file")
    table.add_row("base", console.PathCell(PATH))
    console.print_table(table)
    return output.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_a_terminal_shows_the_file_s_name_within_its_width(monkeypatch, width):
    lines = printed(monkeypatch, width, is_terminal=True)

    (row,) = (line for line in lines if line.strip().startswith("base"))
    assert "/expert.safetensors" in row
    assert len(row) <= width


@pytest.mark.parametrize("width", [20, 80])
def test_elsewhere_a_path_stands_whole_on_its_line(monkeypatch, width):
    lines = printed(monkeypatch, width, is_terminal=False)

    assert sum(PATH in line for line in lines) == 1


def test_a_line_is_printed_as_it_is(capsys):
    text = "/data/[red]/run:on:1/:x:.safetensors"

    console.print_line(text)
    console.show_error(text)

    printed = capsys.readouterr()
    assert printed.out == f"{text}\n"
    assert printed.err == f"error: {text}\n"


@pytest.mark.parametrize("setting", sorted({*SETTINGS, "memory_budget"} - {"device", "compute_dtype"}))
def test_settings_of_the_engine_are_shown_as_they_are_typed(setting):
    message = f"say {setting}=x, or {setting}=y"

    assert console.as_typed(message) == f"say engine.{setting}=x, or engine.{setting}=y"
    assert console.as_typed(console.as_typed(message)) == console.as_typed(message)
    assert console.as_typed(f'EngineOptions({setting}="x")') == f'EngineOptions({setting}="x")'


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (bars, pace):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_long_measurement_is_in_the_log_every_few_seconds(clock, monkeypatch, caplog):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    shown = bars.MeasuringBars()
    with caplog.at_level("INFO"):
        for done in range(0, 101, 10):
            shown.show("alpha=0.3", "documents", done, 100)
            clock.now += 3
        shown.end("alpha=0.3")

    assert caplog.messages[0] == "alpha=0.3: 10 of 100 documents, 27 s left"
    assert caplog.messages[-1] == "alpha=0.3: 90 of 100 documents, 3 s left"
    assert len(caplog.messages) == 5  # six seconds apart


def test_measurements_side_by_side_have_a_bar_each(clock, monkeypatch):
    output = io.StringIO()
    output.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", output)
    monkeypatch.setattr(bars, "stderr", Console(file=output, force_terminal=True, width=100))
    shown = bars.MeasuringBars()
    for done in (0, 2, 4):
        for name in ("first", "second"):
            shown.show(name, "rows", done, 4)
        clock.now += 1
    for name in ("first", "second", "never shown"):
        shown.end(name)

    assert "measuring first, rows" in output.getvalue() and "measuring second, rows" in output.getvalue()
    assert "2/4" in output.getvalue()
    assert shown._progress is None  # so that the next bar can be drawn


def test_the_bar_of_a_merge_and_those_of_measurements_are_drawn_together(clock, monkeypatch):
    output = io.StringIO()
    output.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", output)
    monkeypatch.setattr(bars, "stderr", Console(file=output, force_terminal=True, width=100))
    shown = bars.MeasuringBars()
    for done in (0, 2):  # by a worker, while the next models are merged
        shown.show("first", "rows", done, 4)
        clock.now += 2
    with bars.byte_bar("merging", 100) as advance:
        advance("key.weight", 50)
        shown.show("second", "rows", 0, 4)
        shown.end("first")
    shown.end("second")

    assert "measuring first, rows" in output.getvalue()
    assert shown._progress is None


def test_the_time_left_is_that_of_the_points_so_far(clock):
    kept = pace.Pace()
    clock.now += 30
    assert kept.note(99) == pytest.approx(30 * 99)
    clock.now += 10
    assert kept.note(98) == pytest.approx(20 * 98)


def test_what_takes_no_time_or_is_done_once_does_not_count_for_the_others(clock):
    kept = pace.Pace()
    assert [kept.note(10 - number, is_known=True) for number in range(6)] == [0] * 6
    clock.now += 20
    assert kept.note(4, seconds_of_inputs=16) == pytest.approx(4 * 4)
    clock.now += 4
    assert kept.note(3) == pytest.approx(4 * 3)


def test_what_comes_before_the_points_does_not_count(clock):
    kept = pace.Pace()
    clock.now += 20  # imports
    kept.begin()
    clock.now += 1
    assert kept.note(9) == pytest.approx(9)
    kept.begin()  # another batch of the same sweep
    clock.now += 3
    assert kept.note(8) == pytest.approx(2 * 8)


@pytest.mark.parametrize(("seconds", "spoken"), [(42, "42 s"), (1000, "17 min"), (20000, "5.6 h")])
def test_times_are_spoken(seconds, spoken):
    assert pace.spoken_time(seconds) == spoken

"""How far a merge is, in words."""

import io
import itertools
import re
import sys

import pytest
from rich.console import Console

from mecha_exp import merge, weighted_sum
from mecha_exp.system import progress
from mecha_exp.system.memory import peak_memory
from mecha_exp.system.progress import human_bytes, merge_summary
from mecha_exp.terminal import bars


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_132_000_000, "2.1 GB"), (5e15, "5000.0 TB")],
)
def test_sizes_are_in_powers_of_a_thousand(count, words):
    assert human_bytes(count) == words


def test_what_a_merge_took_is_one_line():
    said = "2.00 s: 4.0 GB read, 2.0 GB written, 3.0 GB/s, peak memory 300.0 MB"
    assert merge_summary(2.0, 4e9, 2e9, 3e8) == said
    assert merge_summary(0.0, 0, 0, 0) == "0.00 s: 0 B read, 0 B written, 0 B/s, peak memory 0 B"


def test_a_process_that_runs_torch_takes_some_memory():
    assert 50e6 < peak_memory() < 50e9


def test_a_terminal_has_a_bar_with_bytes_rate_time_left_and_the_end_of_the_key(monkeypatch):
    screen, ticks = io.StringIO(), itertools.count()
    terminal = Console(file=screen, force_terminal=True, width=120, get_time=lambda: next(ticks))
    monkeypatch.setattr(bars, "stderr", terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)

    with bars.byte_bar("merging", 4_000_000) as advance:
        for _ in range(3):
            advance("a.very.long.prefix.of.the.key.model.layers.0.attention.weight", 1_000_000)

    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(
        r"merging ━+.* 3\.0/4\.0 MB 1\.0 MB/s 0:00:01 \.the\.key\.model\.layers\.0\.attention\.weight", shown
    )


def test_without_a_terminal_nothing_is_shown_and_the_log_is_told(monkeypatch, capsys, caplog):
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)

    with caplog.at_level("INFO"), bars.byte_bar("merging", 4_000_000) as advance:
        advance("a.weight", 1_000_000)

    assert capsys.readouterr() == ("", "")
    assert re.search(r"1\.0 MB of 4\.0 MB, .*B/s, \d+ s left, at a\.weight", caplog.text)


def test_a_merge_in_a_script_says_nothing_but_in_a_log_that_it_asks_for(models, capsys, caplog):
    merge(weighted_sum(*models(2), alpha=0.3))

    assert capsys.readouterr() == ("", "")
    assert not caplog.records

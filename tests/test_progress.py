"""How far a merge is, in words."""

import pytest

from mecha_exp.memory import peak_memory
from mecha_exp.progress import human_bytes, merge_summary


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

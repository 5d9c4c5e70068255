"""Lines about the points of a sweep, and how long they take."""

from __future__ import annotations

import time

from mecha_exp.runs.record import Record
from mecha_exp.terminal.console import print_line

_LONG = 10
"""Seconds that are left of a sweep that are part of a point's line."""
_WORTH_SAYING = 0.5
"""Seconds of measuring inputs that are part of a point's line."""


def show_point(
    record: Record, number: int, points: int, seconds_of_inputs: float = 0, seconds_left: float = 0
) -> None:
    """Print a line for a finished point of a sweep, with the time of inputs that were measured first.

    Args:
        record: of the point.
        number: of the point, from 1.
        points: of the sweep; 0 where a search decides it.
        seconds_of_inputs: how long the inputs took that were measured before it.
        seconds_left: for the points that are left.
    """
    measured = record.metrics.get(record.metric or "")
    score = f"{record.metric} {measured:.4g}" if measured is not None else record.status.lower()
    if record.dropped is not None:
        score = f"dropped {record.dropped_where}"
    seconds = (record.ended - record.started) / 1000
    total = f"/{points}" if number <= points else ""  # a searching sweeper does not know the total
    inputs = (
        f", of which {seconds_of_inputs:.1f} s for the inputs" if seconds_of_inputs >= _WORTH_SAYING else ""
    )
    left = f"; {spoken_time(seconds_left)} left" if seconds_left >= _LONG else ""
    print_line(f"[{number}{total}] {record.name}: {score}, {seconds:.1f} s{inputs}{left}")


class Pace:
    """How long the points of a sweep that are left will take, from those that this start has made."""

    def __init__(self) -> None:
        self._began, self._made = time.monotonic(), 0

    def begin(self) -> None:
        """Note that points are about to be made: imports, checks and hashes took the time until now."""
        if not self._made:
            self._began = time.monotonic()

    def note(self, left: int, seconds_of_inputs: float = 0, *, is_known: bool = False) -> float:
        """Note that one more point is made; returns the seconds for so many others, 0 where nothing tells.

        Args:
            left: the points that are left.
            seconds_of_inputs: how long the inputs took that were measured with it, once for all points.
            is_known: whether the store had the point, which so took no time.
        """
        self._began += seconds_of_inputs
        self._made += not is_known
        return (time.monotonic() - self._began) / self._made * left if self._made else 0


def spoken_time(seconds: float) -> str:
    """A time for people.

    >>> spoken_time(42), spoken_time(1000), spoken_time(20000)
    ('42 s', '17 min', '5.6 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

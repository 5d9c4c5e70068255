"""Where the processor time of a sweep goes, stage by stage, beside the evaluator's forward passes alone.

    python -m bench.budget recipe=ties alpha=0.3,0.5 -m     one command: the seconds of each stage, as JSON

`python -m bench.sweeps --budget` prints the table. A stage is the time in some functions of the main thread
without that of stages within it; what other threads do meanwhile counts to the stage that is open.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

STAGES = {
    "compose": (
        "app.main:command_line._check",
        "app.loop:multirun_config",
        "app.config.compose:Composer.jobs",
        "app.config.jobs:Jobs.compose",
        "app.launchers.onepass:prepare_job",
    ),
    "plan": (
        "app.loop:require_one_good_point",
        "app.launchers.onepass:_sign",
        "app.launchers.onepass:recall",
        "app.batch:plan",
    ),
    "merge": ("app.workbench:merge_points", "app.batch:run_plan"),
    "load": ("app.measurements:load_state_dict",),
    "measure": ("evaluation.scoring:measured_by",),
    "forward": ("examples.digits.network:DigitsNetwork.forward",),
    "record": ("app.launchers.onepass:run_job",),
    "track": (
        "app.launchers.run:_PointRun.track",
        "app.sweep.summary:close_run",
        "app.sweep.summary:log_missing",
        "app.sweep.summary:Store",
        "app.loop:summary.mend",
        "app.tracking:Tracker.flush",
    ),
    "table": ("app.loop:summary.finish",),
}
"""The functions whose time is that of a stage, by the modules that call them."""
START, REST = "start", "rest"


class Clock:
    """Processor seconds by stage, each without the stages within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open, self._since = [START], 0.0
        self._thread = threading.get_ident()

    def turn(self) -> None:
        """Give the time since the last turn to the open stage."""
        before, self._since = self._since, time.process_time()
        self.seconds[self._open[-1]] += self._since - before

    def open(self, stage: str) -> None:
        """Begin a stage, or go on with it."""
        self.turn()
        self._open.append(stage)

    def close(self) -> None:
        """Go back to the stage before."""
        self.turn()
        self._open.pop()

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time in the main thread is given to a stage."""

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*arguments, **named)
            self.open(stage)
            try:
                return function(*arguments, **named)
            finally:
                self.close()

        return call

    def watch(self) -> None:
        """Time the functions of all stages."""
        for stage, places in STAGES.items():
            for place in places:
                module, _, path = place.partition(":")
                *owners, name = path.split(".")
                owner: Any = import_module(f"mecha_exp.{module}")
                for each in owners:
                    owner = getattr(owner, each)
                setattr(owner, name, self.timed(stage, getattr(owner, name)))


def main() -> int:
    """Run a command line of the application; prints the seconds of its stages at the end."""
    from mecha_exp.cli import main as run
    from mecha_exp.system.imports import import_without_gc

    clock = Clock()
    import_without_gc("mecha_exp.app.main")
    clock.watch()
    clock.open(REST)
    status = run()
    clock.turn()
    sys.stdout.write(f"\n{json.dumps(clock.seconds)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())

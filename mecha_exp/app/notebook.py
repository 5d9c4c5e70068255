"""`mecha_exp.sweep`: a sweep from Python, by the loop of the command line."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.errors import ConfigError, TrackingError

if TYPE_CHECKING:
    from mecha_exp.report import Results
    from mecha_exp.verdict import Verdict


@dataclass(frozen=True)
class SweepPoint:
    """A merged model of a sweep.

    Attributes:
        settings: what it sets, of the keys that were varied.
        metrics: its numbers by name, such as `accuracy`, `test/accuracy`; times in seconds, sizes in bytes.
        model: the path of its model; None where it was not saved.
        folder: of its record, recipe and outcomes.
        error: what went wrong; None for a finished point.
    """

    settings: dict[str, Any]
    metrics: dict[str, float]
    model: Path | None
    folder: Path
    error: str | None


@dataclass(frozen=True)
class SweepResult:
    """A sweep that has ended: its points, its table, its verdict. In a notebook it shows itself as a table.

    Attributes:
        folder: with all of it: `report.html`, `sweep.csv`, `verdict.json`, figures, a folder for each point.
    """

    folder: Path

    @cached_property
    def _results(self) -> Results:
        from mecha_exp.report.conclusion import concluded_results
        from mecha_exp.runs.sweep import Sweep

        return concluded_results(Sweep.load(self.folder), self.folder, ended=True)

    @cached_property
    def points(self) -> list[SweepPoint]:
        """The points in their order."""
        from mecha_exp.runs.sweep import Sweep

        sweep = Sweep.load(self.folder)
        return [
            SweepPoint(
                {key: self._results.value(record, key) for key in sweep.swept},
                dict(record.metrics),
                Path(record.model) if record.model else None,
                folder,
                record.error,
            )
            for folder, record in sweep.records(self.folder).items()
        ]

    @property
    def best(self) -> SweepPoint | None:
        """The first point of the best setting by the main metric; None where nothing was measured."""
        number = self._results.numbers.get(id(self._results.best))
        return next((point for point in self.points if point.folder.name == str(number)), None)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the settings: intervals, tests, what cannot be told apart."""
        return self._results.verdict

    @property
    def conclusion(self) -> str:
        """What the data show, in words; see docs/verdict.md. Empty where nothing was measured."""
        from mecha_exp.report.verdict import conclusion

        return " ".join(conclusion(self._results))

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The columns of `sweep.csv`, a value for each point, then each input; for `pandas.DataFrame`."""
        from mecha_exp.report.export import columns

        return columns(self._results)

    @property
    def figures(self) -> list[Path]:
        """The figures, as PNG files."""
        return sorted(self.folder.glob("sweep*.png"))

    def __str__(self) -> str:
        """The table of the terminal."""
        from rich.console import Console

        from mecha_exp.report import terminal_tables

        console = Console(width=110, highlight=False)
        with console.capture() as captured:
            console.print(*terminal_tables(self._results, console.width, is_whole=True), sep="\n")
        return captured.get().rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def sweep(
    settings: Mapping[str, Any],
    vary: Mapping[str, Sequence[Any]] | None = None,
    *,
    folder: str | PathLike[str] | None = None,
    config_dir: str | PathLike[str] | None = None,
    quiet: bool = False,
) -> SweepResult:
    """Merge and measure every point of a sweep, and conclude: what the command line does with `-m`.

    A point whose result is known from an earlier sweep is not made again. An evaluator that was defined
    with `@mecha_exp.evaluator` is chosen by `{"evaluator.name": "its_name"}`.

    >>> done = sweep({"recipe": "ties", "output": "none"}, {"alpha": [0.3, 0.5]})  # doctest: +SKIP
    >>> done.best.settings, done.best.metrics["accuracy"]  # doctest: +SKIP
    ({'alpha': 0.5}, 0.8825)

    Args:
        settings: what all points have, by the keys of the command line: `{"recipe": "ties", "models.base":
            "base.safetensors", "models.experts": ["a.safetensors", "b.safetensors"], "evaluator":
            "perplexity"}`. A value is a number, a text, a path, None, or a list or dictionary of these.
        vary: the values of each key that differs between points; their grid is swept, or what
            `settings["sweep"]` says (`zip`, `random`, `search` and others, with `"sweep.n"` and so on). A
            text such as "interval(0,1)" is a range of a search.
        folder: for the sweep; None for a new one in `outputs/multiruns`, or that of the same sweep before.
        config_dir: a folder with recipes and other configuration files of yours.
        quiet: whether to print nothing.

    Returns:
        the result; also where points failed, which have an `error` then.

    Raises:
        ConfigError: everything that is wrong with the settings, before any work.
        MechaError: no point can be merged or measured.
        TrackingError: the sweep has ended, and its MLflow run could not be written.
        KeyboardInterrupt: Ctrl-C; the same call goes on.
    """
    words = [*_words(settings), *(f"{key}={_listed(key, values)}" for key, values in (vary or {}).items())]
    if folder is not None:
        words.append(f"hydra.sweep.dir={_text(str(folder))}")
    flags = ["-m"] if config_dir is None else ["-m", "--config-dir", str(config_dir)]
    with _console(quiet):
        return _swept([*flags, *words])


def _swept(arguments: list[str]) -> SweepResult:
    from mecha_exp.app.command_line import checked
    from mecha_exp.app.loop import run_sweep
    from mecha_exp.app.workbench import workbench
    from mecha_exp.plugins import load_plugins

    with checked(arguments) as line:
        load_plugins(line.config.get("plugins") or ())
        bench = workbench(line.config.store, line.config.rerun)
        bench.begin()
        ended = run_sweep(line, bench)
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.trouble:
        raise TrackingError(f"{ended.trouble} The sweep is in {ended.folder}.")
    return SweepResult(ended.folder)


def _words(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _listed(key: str, values: Sequence[Any]) -> str:
    """The values of a key that is varied; a text is a range or the like, as it is typed."""
    if isinstance(values, str):
        return values
    if isinstance(values, Mapping) or not hasattr(values, "__iter__"):
        raise ConfigError(f"vary[{key!r}]: expected a list of values, got {values!r}.")
    if not (texts := [_text(value) for value in values]):
        raise ConfigError(f"vary[{key!r}] has no values.")
    return ",".join(texts)


def _text(value: Any) -> str:
    """A value in the grammar of overrides.

    >>> _text(["a b", 0.5, None, {"k": True}])
    "['a b',0.5,null,{k:true}]"
    """
    from mecha_exp.app.words.quotes import quoted

    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # a number of NumPy or torch
        return _text(value.item())
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | PathLike):
        return quoted(str(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(v)}" for key, v in value.items()) + "}"
    if hasattr(value, "__iter__"):
        return "[" + ",".join(map(_text, value)) + "]"
    raise ConfigError(f"expected a number, a text, a path, None, a list or a dictionary, got {value!r}.")


@contextmanager
def _console(quiet: bool) -> Iterator[None]:
    from mecha_exp.terminal.console import stderr, stdout

    before = stdout.quiet, stderr.quiet
    stdout.quiet = stderr.quiet = quiet
    try:
        yield
    finally:
        stdout.quiet, stderr.quiet = before

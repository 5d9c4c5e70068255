"""The samplers of a search by name, with their options; Optuna is imported when one is made."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mecha_exp.app.search.space import Space
from mecha_exp.app.sweep.settings import checked_count
from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.system.optuna_log import quiet_optuna

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from mecha_exp.app.search.trials import Trial

SAMPLERS = {
    "tpe": "TPESampler",
    "cmaes": "CmaEsSampler",
    "nsga2": "NSGAIISampler",
    "nsga3": "NSGAIIISampler",
    "gp": "GPSampler",
    "qmc": "QMCSampler",
    "random": "RandomSampler",
}
"""The classes of Optuna, by the names of `sweep.sampler`."""
SEQUENCE = "qmc"
"""The sampler whose trials are the places of one sequence, so that its seed stays the same."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "tpe": {"constant_liar": True},  # without it the trials of a batch all but repeat one another
    "cmaes": {"warn_independent_sampling": False},
    "gp": {"warn_independent_sampling": False},
    "qmc": {"warn_independent_sampling": False, "warn_asynchronous_seeding": False, "scramble": True},
}
_STARTUP: Mapping[str, tuple[str, int]] = {
    "tpe": ("n_startup_trials", 10),
    "gp": ("n_startup_trials", 10),
    "cmaes": ("n_startup_trials", 1),
    "nsga2": ("population_size", 50),
    "nsga3": ("population_size", 50),
}
"""The option that says how many trials a sampler draws at random before it learns, and Optuna's default."""
_NEEDED_NUMBERS = {"cmaes": 2, "qmc": 1}
"""The fewest keys with numbers that a sampler works on; it would draw all others at random."""
_SIMPLE = (bool, int, float, str)


@dataclass(frozen=True)
class Sampler:
    """A sampler by name, with its options.

    Attributes:
        name: a key of `SAMPLERS`.
        seed: of its random numbers.
        options: arguments of Optuna's class.
    """

    name: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.name} with seed {self.seed}{more}"

    def make(self, number: int) -> BaseSampler:
        """Optuna's sampler for the trials from a number on; each batch has random numbers of its own."""
        import optuna

        seed = self.seed if self.name == SEQUENCE else (self.seed * 1_000_003 + number) % 2**32
        options = {**_DEFAULTS.get(self.name, {}), **self.options}
        with self.errors_named():
            sampler: BaseSampler = getattr(optuna.samplers, SAMPLERS[self.name])(seed=seed, **options)
        return sampler

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Turn an error of a sampler with options, of any kind, into one that names them.

        Raises:
            ConfigError: the sampler has failed with its options.
        """
        try:
            yield
        except Exception as error:
            if not self.options:
                raise
            reason = str(error) or type(error).__name__
            raise ConfigError(f"sweep.options: {self.name} does not take them: {reason}") from error

    def draws_at_random(self, earlier: Sequence[Trial]) -> bool:
        """Whether it draws the next trial at random, after the earlier ones."""
        if self.name not in _STARTUP:
            return self.name == "random"
        option, default = _STARTUP[self.name]
        finished = sum(
            t.values is not None or (t.dropped is not None and self.name == "tpe") for t in earlier
        )
        return finished < int(self.options.get(option, default))


def require_optuna() -> None:
    """Raise unless Optuna is installed.

    Raises:
        ConfigError: it is not, or it is an older one.
    """
    how = "pip install 'mecha_exp[search]'."
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(f"sweep=search needs Optuna, which is not installed: {how}")
    import optuna

    if int(optuna.__version__.partition(".")[0]) < 4:
        raise ConfigError(f"sweep=search needs Optuna 4 or newer, not {optuna.__version__}: {how}")


def checked_sampler(
    name: Any, seed: Any, options: Mapping[str, Any], space: Space, objectives: int = 1
) -> Sampler:
    """The sampler that a configuration asks for.

    Raises:
        ConfigError: an unknown name or option, a seed that is not a number, a sampler for another space or
            for one objective.
    """
    if name not in SAMPLERS:
        hint = did_you_mean(str(name), SAMPLERS) or f" They are {', '.join(SAMPLERS)}."
        raise ConfigError(f"sweep.sampler={name}: there is no such sampler.{hint}")
    checked_count("sweep.seed", seed, least=0)
    numbers = [d.key for d in space.dimensions if not d.choices]
    if len(numbers) < _NEEDED_NUMBERS.get(name, 0):
        raise ConfigError(
            f"sweep.sampler={name} searches {_NEEDED_NUMBERS[name]} or more keys with numbers, and there "
            f"{'is' if len(numbers) == 1 else 'are'} {len(numbers) or 'none'}. Choose sweep.sampler=tpe."
        )
    if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
        raise ConfigError(
            "sweep.sampler=cmaes needs cmaes, which is not installed: pip install 'mecha_exp[search]'."
        )
    if objectives > 1 and name not in (several := _for_several_objectives()):
        raise ConfigError(
            f"sweep.sampler={name} searches for one objective, and evaluator.metric names {objectives}. "
            f"Choose one of {', '.join(several)}."
        )
    _check_options(name, options)
    sampler = Sampler(name, seed, dict(options))
    with quiet_optuna():
        sampler.make(0)
    return sampler


def _for_several_objectives() -> list[str]:
    """The samplers that trade off several objectives; `gp` does since Optuna 4.4."""
    import optuna

    major, minor = (int(part) for part in optuna.__version__.split(".")[:2])
    lacking = {"cmaes"} if (major, minor) >= (4, 4) else {"cmaes", "gp"}
    return [name for name in SAMPLERS if name not in lacking]


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    import optuna

    known = [
        parameter
        for parameter in inspect.signature(getattr(optuna.samplers, SAMPLERS[name])).parameters
        if parameter != "seed"
    ]
    for option, value in options.items():
        if option not in known:
            hint = did_you_mean(str(option), known) or f" It has {', '.join(known) or 'none'}."
            raise ConfigError(f"sweep.options.{option}: the sampler {name} has no such option.{hint}")
        if value is not None and not isinstance(value, _SIMPLE):
            raise ConfigError(f"sweep.options.{option}: expected a number, a text, true or false.")
        if option == _STARTUP.get(name, ("", 0))[0]:
            checked_count(f"sweep.options.{option}", value, least=0)

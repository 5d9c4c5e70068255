"""The space of a search: what is varied, within which bounds, and which recipe has which key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig

from mecha_exp.app.sweep.hyperparameters import GROUP, drop_unused
from mecha_exp.app.sweep.points import Points
from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.lab.points import SAMPLED_DIGITS, Setting, as_text, normalized, unique

MODE = "search"
"""The mode of the group `sweep` that searches."""

_MOST_DIGITS = 17

Parameters = dict[str, Any]
"""The values of a trial by key: numbers, and texts of choices."""


@dataclass(frozen=True)
class Dimension:
    """A key that is searched: choices, or numbers within bounds.

    Attributes:
        key: of the configuration.
        sign: the `+` or `++` before it, as typed.
        choices: texts; empty for numbers.
        low, high: the bounds, both included.
        step: the distance between numbers; None for all numbers between the bounds.
        is_integer: whether the numbers are integers.
        logarithmic: whether the range is drawn from by its logarithm.
    """

    key: str
    sign: str = ""
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    is_integer: bool = False
    logarithmic: bool = False

    @property
    def description(self) -> dict[str, Any]:
        """What of it is not as it is by default, as JSON has it: a later field changes no older search."""
        usual = Dimension(self.key, self.sign)
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)]
        own = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}

    @property
    def size(self) -> float:
        """The number of its values; infinite for an interval of real numbers."""
        if self.choices:
            return len(self.choices)
        return math.inf if self.step is None else round((self.high - self.low) / self.step) + 1

    @property
    def values(self) -> list[Any]:
        """All of its values, where they can be counted."""
        if self.choices:
            return list(self.choices)
        assert self.step is not None
        return [self._number(self.low + i * self.step) for i in range(int(self.size))]

    @property
    def probes(self) -> list[str]:
        """The texts of three of its values, by which a command line is checked: the middle and the ends."""
        if self.choices:
            return [self.choices[len(self.choices) // 2], self.choices[0], self.choices[-1]]
        middle = math.sqrt(self.low * self.high) if self.logarithmic else (self.low + self.high) / 2
        if self.step is not None:
            middle = self._number(self.low + round((middle - self.low) / self.step) * self.step)
        return [self.text(number) for number in (middle, self.low, self.high)]

    def text(self, value: Any) -> str:
        """A value as it is typed, within the bounds: six significant digits, more in a narrow interval."""
        if self.choices or self.is_integer:
            return str(value)
        narrowness = max(abs(self.low), abs(self.high)) / (self.high - self.low)
        digits = min(SAMPLED_DIGITS + max(0, math.ceil(math.log10(narrowness))), _MOST_DIGITS)
        number = min(max(float(f"{value:.{digits}g}"), self.low), self.high)
        short = normalized(repr(number))
        return short if self.low <= float(short) <= self.high else repr(number)

    def value(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            ConfigError: the text is not one of the choices, or outside the bounds.
        """
        if self.choices:
            if normalized(text) in self.choices:
                return normalized(text)
            raise ConfigError(f"{self.key}={text} is none of {', '.join(self.choices)}.")
        try:
            number = float(text)
        except ValueError:
            raise ConfigError(f"{self.key}={text} is not a number.") from None
        if not self.low <= number <= self.high:
            raise ConfigError(f"{self.key}={text} is outside of {self.low:g} to {self.high:g}.")
        if self.step is not None and not math.isclose(
            (number - self.low) / self.step, round((number - self.low) / self.step), abs_tol=1e-6
        ):
            raise ConfigError(f"{self.key}={text} is not {self.low:g} plus a multiple of {self.step:g}.")
        return self._number(number)

    def _number(self, number: float) -> float:
        return round(number) if self.is_integer else number


@dataclass(frozen=True)
class Space:
    """The space of a search.

    Attributes:
        dimensions: what is searched, the recipe first if it is.
        branches: for each recipe, what its points set: constants, and the keys that it has of `dimensions`.
            One branch, of an empty name, where the recipe is not searched.
    """

    dimensions: tuple[Dimension, ...]
    branches: Mapping[str, Setting]

    @property
    def size(self) -> float:
        """The number of its points; infinite with an interval of real numbers."""
        return sum(math.prod(d.size for d in self._of(branch) if d.key != GROUP) for branch in self.branches)

    @property
    def description(self) -> dict[str, Any]:
        """The dimensions and branches as JSON has them, by which two spaces are compared."""
        dimensions = {d.sign + d.key: d.description for d in self.dimensions}
        return {"dimensions": dimensions, "branches": {k: sorted(v) for k, v in self.branches.items()}}

    def draw(self, suggest: Callable[[Dimension], Any]) -> Parameters:
        """The parameters of a trial, each suggested when it is known that the trial has it."""
        drawn: Parameters = {}
        for dimension in self.dimensions:
            if dimension.key == GROUP:
                drawn[GROUP] = suggest(dimension)
            elif dimension in self._of(drawn.get(GROUP, "")):
                drawn[dimension.key] = suggest(dimension)
        return drawn

    def setting(self, parameters: Parameters) -> Setting:
        """The settings of a trial's point, as texts."""
        branch = self.branches[parameters.get(GROUP, "")]
        own = {d.sign + d.key: d.text(parameters[d.key]) for d in self.dimensions if d.key in parameters}
        return {**branch, **own}

    def parameters(self, point: Mapping[str, Any]) -> Parameters:
        """The parameters that a point of `sweep.enqueue` stands for; they may be some of all.

        Raises:
            ConfigError: it sets what is not searched, or a value that is not in the space.
        """
        by_key = {dimension.key: dimension for dimension in self.dimensions}
        of_recipe = self._of(str(point[GROUP])) if str(point.get(GROUP)) in self.branches else []
        if of_recipe:
            by_key = {dimension.key: dimension for dimension in of_recipe}
        unknown = next((str(key) for key in point if str(key) not in by_key), None)
        if unknown is not None:
            hint = did_you_mean(unknown, by_key) or f" It searches {', '.join(by_key)}."
            raise ConfigError(f"{unknown} is not searched.{hint}")
        return {str(key): by_key[str(key)].value(as_text(value)) for key, value in point.items()}

    def all_parameters(self) -> Iterator[Parameters]:
        """All points of a finite space."""
        for branch in self.branches:
            points: list[Parameters] = [{GROUP: branch} if branch else {}]
            for dimension in self._of(branch):
                if dimension.key != GROUP:
                    points = [{**p, dimension.key: value} for p in points for value in dimension.values]
            yield from points

    def _of(self, branch: str) -> list[Dimension]:
        return [d for d in self.dimensions if d.sign + d.key in self.branches[branch]]


@dataclass(frozen=True)
class SearchedPoints(Points):
    """The points that stand for a search: three of its space, or three for each recipe.

    Attributes:
        space: what is searched.
    """

    space: Space = field(default_factory=lambda: Space((), {}))


def searched_points(overrides: Sequence[Override], config: DictConfig) -> SearchedPoints:
    """The space of a search, with a few points of it by which its words are checked.

    Args:
        overrides: of the command line.
        config: with its groups chosen.

    Raises:
        ConfigError: a space that is empty, infinite, or of nothing.
    """
    varied = [dimension_of(o) for o in overrides if o.is_sweep_override()]
    if not varied:
        raise ConfigError(
            "sweep=search has nothing to search: no key has an interval or several values. Say for instance "
            "'alpha=interval(0,1.5)'."
        )
    varied.sort(key=lambda d: d.key != GROUP)
    fixed = [o for o in overrides if not o.is_sweep_override()]
    keys = [d.key for d in varied]
    probes = [{d.sign + d.key: d.probes[i] for d in varied} for i in range(3)]
    if varied[0].key != GROUP:
        words = [str(o.input_line) for o in fixed]
        return SearchedPoints(keys, words, unique(probes), space=Space(tuple(varied), {"": probes[0]}))
    recipes = varied[0].choices
    settings = [{**probe, GROUP: recipe} for probe in probes for recipe in recipes]
    fitted = drop_unused(settings, fixed, list(probes[0]), config)
    branches = dict(zip(recipes, fitted.settings[: len(recipes)], strict=True))
    words = [str(o.input_line) for o in fitted.fixed]
    more = (fitted.own, fitted.left_out, fitted.meanings)
    return SearchedPoints(keys, words, unique(fitted.settings), *more, Space(tuple(varied), branches))


def dimension_of(override: Override) -> Dimension:
    """The dimension of an override with several values.

    Raises:
        ConfigError: it has no value, or infinitely wide bounds.
    """
    key = override.key_or_group
    sign = override.get_key_element().partition(key)[0]
    value = override.value()
    if isinstance(value, IntervalSweep):
        return _interval(key, sign, value, str(override.input_line))
    if isinstance(value, RangeSweep) and isinstance(value.start, int | float):
        return _range(key, sign, value, str(override.input_line))
    choices = tuple(dict.fromkeys(normalized(text) for text in override.sweep_string_iterator()))
    return Dimension(key, sign, choices)


def _interval(key: str, sign: str, value: IntervalSweep, word: str) -> Dimension:
    low, high, logarithmic = value.start, value.end, "log" in value.tags
    assert low is not None and high is not None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{word}: the space is infinite. Give two finite bounds.")
    if low >= high:
        raise ConfigError(f"{word}: the space is empty. The first bound is the smaller one: interval(0,1.5).")
    if logarithmic and low <= 0:
        raise ConfigError(f"{word}: the bounds of a logarithmic interval are above 0.")
    is_integer = isinstance(low, int) and isinstance(high, int)
    return Dimension(key, sign, (), low, high, 1 if is_integer else None, is_integer, logarithmic)


def _range(key: str, sign: str, value: RangeSweep, word: str) -> Dimension:
    """The dimension of `range(start,stop,step)`, whose stop is not in it."""
    numbers = list(value.range())
    numbers = [n for n in numbers if not math.isclose(n, float(value.stop or 0), rel_tol=1e-9)]
    if not numbers:
        raise ConfigError(f"{word}: the space is empty.")
    is_integer = all(isinstance(n, int) for n in numbers)
    if len(numbers) == 1:
        return Dimension(key, sign, (normalized(str(numbers[0])),))
    low, high, step, logarithmic = min(numbers), max(numbers), abs(value.step), "log" in value.tags
    if logarithmic and (step != 1 or low <= 0):
        raise ConfigError(f"{word}: a logarithmic range has step 1 and begins above 0.")
    return Dimension(key, sign, (), low, high, step, is_integer, logarithmic)

"""Settings of a sweep: points that are replicates of each other, with estimates of their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mecha_exp.lab.points import SOUP_KEY, TRIAL
from mecha_exp.runs.environment import differs_from_here
from mecha_exp.runs.record import FAILED, Record
from mecha_exp.runs.values import ALL_DIGITS, Value, as_text


@dataclass(frozen=True)
class Estimate:
    """The mean of a metric over replicates, with its confidence interval.

    Attributes:
        mean: of the finite values; NaN if there are none.
        half_width: of the 95 % confidence interval of the mean (Student's t); None for fewer than two values.
        count: the number of finite values.
        lost: the number of values that are not finite.
        span: the least and the greatest value, where they are of different hyperparameters, whose spread is
            not an error of the mean; None for replicates.
        ci95: the 95 % interval over examples and replicates that the verdict has; None where there is none.
    """

    mean: float
    half_width: float | None
    count: int
    lost: int = 0
    span: tuple[float, float] | None = None
    ci95: tuple[float, float] | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of its interval: the verdict's, or else over replicates alone; NaN where it has none."""
        if self.ci95 is not None:
            return self.ci95
        half_width = math.nan if self.half_width is None else self.half_width
        return self.mean - half_width, self.mean + half_width

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate the mean of values, without NaN and infinities.

        >>> Estimate.of([1.0, 2.0, 3.0])
        Estimate(mean=2.0, half_width=2.4841377117503303, count=3, lost=0, span=None, ci95=None)
        """
        finite = [value for value in values if math.isfinite(value)]
        count, lost = len(finite), len(values) - len(finite)
        if not finite:
            return cls(math.nan, None, 0, lost)
        mean = math.fsum(finite) / count
        if count == 1:
            return cls(mean, None, 1, lost)
        from mecha_exp.verdict.intervals import student_quantile

        freedom = count - 1
        if min(finite) == max(finite):  # otherwise the rounding of the mean would show
            return cls(finite[0], 0.0, count, lost)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / freedom)
        quantile = float(student_quantile(freedom))
        return cls(mean, quantile * deviation / math.sqrt(count), count, lost)


@dataclass(frozen=True)
class Setting:
    """Points that differ only in their seed or their set of experts, or in keys that a table leaves out.

    Attributes:
        values: of the swept keys, without those of replicates.
        records: the points.
        pooled: whether the points differ in hyperparameters, too.
    """

    values: Mapping[str, Value]
    records: Sequence[Record]
    pooled: bool = False

    @cached_property
    def finished(self) -> list[Record]:
        """The points that were merged and measured."""
        return [record for record in self.records if record.status != FAILED]

    @property
    def dropped(self) -> bool:
        """Whether a race dropped a point, so that there is no number of the setting."""
        return any(record.dropped is not None for record in self.finished)

    @property
    def is_trial(self) -> bool:
        """Whether it only tries an expert for a greedy soup, so that it is never chosen itself."""
        return self.values.get(SOUP_KEY) == TRIAL

    @property
    def name(self) -> str:
        """The values of the swept keys, as in `alpha=0.3,k=0.2`."""
        shown = [
            f"{key}={as_text(value, ALL_DIGITS)}" for key, value in self.values.items() if value is not None
        ]
        return ",".join(shown) or (self.records[0].name if len(self.records) == 1 else "all replicates")

    @property
    def made_with(self) -> list[str]:
        """What its points were made with that is otherwise here: another torch, or another processor."""
        return list(dict.fromkeys(words for r in self.finished for words in differs_from_here(r.tags)))

    def estimate(self, metric: str | None) -> Estimate:
        """Estimate the mean of a metric: with its interval, or with the span of points that are pooled."""
        values = [r.metrics[metric] for r in self.finished if metric and metric in r.metrics]
        estimate = Estimate.of(values)
        if not self.pooled or estimate.count < 2:
            return estimate
        finite = [value for value in values if math.isfinite(value)]
        return replace(estimate, half_width=None, span=(min(finite), max(finite)))

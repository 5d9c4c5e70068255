"""The results of a sweep: its points, grouped over replicates and ranked by the main metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from mecha_exp.errors import counted
from mecha_exp.evaluation.declaration import MERGE_PREFIXES
from mecha_exp.lab.points import LEARNED_KEY, SEED_PATH, SET_KEY, SOUP_KEY
from mecha_exp.report.adaptive_records import NOTHING
from mecha_exp.report.protocol import check_measured_alike, protocol_of
from mecha_exp.report.settings import Setting
from mecha_exp.runs.record import FAILED, RACE, RACE_EXAMPLES, RACE_FIDELITY, Record
from mecha_exp.runs.values import ALL_DIGITS, Value, as_text, parse_value

if TYPE_CHECKING:
    from mecha_exp.report.why.shapley import Attributions
    from mecha_exp.verdict import Verdict


REPLICATE_KEYS = ("seed", SEED_PATH, SET_KEY)
"""Points that differ in these keys only are replicates of one setting."""
BLOCK_KEY = "block"
"""The key of a block ablation; the undisturbed point does not set it."""
MISSING = "–"
"""The text of a missing value in a table."""
METHOD_KEYS = ("recipe", "recipe.method", LEARNED_KEY, SOUP_KEY)
"""Swept keys that name methods; each method has a best setting."""
_ABLATIONS = {
    "leave_one_block_out": "block left out",
    "only_one_block": "only block",
    "leave_one_expert_out": "expert left out",
}
_APART = (BLOCK_KEY, "expert")
"""The keys of what a point of an ablation sets apart; the undisturbed point sets none of them."""
_BY_EXPERT = ("leave_one_expert_out", "experts", "subsets", "shapley", "greedy_soup")
_FALLBACK_METRIC = "weights/relative_change/"


@dataclass(frozen=True)
class Results:
    """The points of a sweep, with the keys that were swept.

    Attributes:
        title: of the sweep.
        swept: the configuration keys that differ between the points.
        records: of the points, in their order.
        chosen: the metric to sort by, instead of the evaluator's main metric.
        mode: of our sweeper, such as `leave_one_block_out`.
        by: the keys to group by, instead of all swept keys.
        shown: the metrics to show, instead of the evaluators' metrics.
        better: the direction of `chosen`.
        remarks: on the sweep as a whole.
        verdict: on the settings; None where there is none, where there are several objectives, or where they
            are grouped by other keys.
        by_objective: the verdict on each of several objectives, for its intervals.
        at_random: the identities (`id`) of the points that a search drew at random.
        given: those of the points with which a search began: known, or enqueued.
        numbers: the number of each point, which is the name of its folder, by the identity of its record;
            empty where it is its place.
        reference: the reference point of the hypervolume of several objectives; empty for the worst values.
        logarithmic: the keys that a search drew by their logarithm; None where that is not known.
        sheet: the keys of columns, rows and pages of contact sheets; those that it lacks follow.
        changes: the 95 % interval of what each block changes in a block ablation, where outcomes give it.
        attributed: Shapley values of a sweep of coalitions with their intervals, where outcomes give them.

    Raises:
        ConfigError: a metric of one name was measured by two evaluations.
    """

    title: str
    swept: Sequence[str]
    records: Sequence[Record]
    chosen: str | None = None
    mode: str | None = None
    by: Sequence[str] = ()
    shown: Sequence[str] = ()
    better: str | None = None
    remarks: Sequence[str] = ()
    verdict: Verdict | None = None
    by_objective: Mapping[str, Verdict] = field(default_factory=dict)
    at_random: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    numbers: Mapping[int, int] = field(default_factory=dict)
    reference: Sequence[float] = ()
    logarithmic: Sequence[str] | None = None
    sheet: Sequence[str] = ()
    changes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    attributed: Attributions | None = None

    def __post_init__(self) -> None:
        """Check that the points were measured alike."""
        check_measured_alike(self.finished)

    @cached_property
    def metric(self) -> str | None:
        """The metric that points are sorted by: the evaluator's main metric, or else the relative change."""
        if self.chosen:
            return self.chosen
        named = next((r.metric for r in self.finished if r.metric), None)
        if named or not self.finished:
            return named
        return next((m for m in self.finished[0].metrics if m.startswith(_FALLBACK_METRIC)), None)

    @cached_property
    def direction(self) -> Literal["maximize", "minimize"]:
        """Whether more of the main metric is better."""
        declared = (r.direction for r in self.finished if r.metric and r.metric == self.metric)
        return "maximize" if (self.better or next(declared, "minimize")) == "maximize" else "minimize"

    @cached_property
    def objectives(self) -> dict[str, str]:
        """The metrics that are traded off, with their directions; empty where one alone decides."""
        return {} if self.chosen else next((r.objectives for r in self.finished if r.objectives), {})

    @cached_property
    def judged(self) -> bool:
        """Whether it is known which direction of the main metric is better."""
        return self.better is not None or any(r.metric == self.metric for r in self.finished)

    @cached_property
    def finished(self) -> list[Record]:
        """The points that did not fail."""
        return [record for record in self.records if record.status != FAILED]

    @cached_property
    def report_splits(self) -> frozenset[str | None]:
        """The splits on which chosen points are reported."""
        return frozenset(record.report_split for record in self.finished)

    @cached_property
    def dropped(self) -> list[Record]:
        """The points that a race dropped."""
        return [record for record in self.finished if record.dropped is not None]

    @cached_property
    def keys(self) -> list[str]:
        """The swept keys that define settings: all but those of replicates, unless nothing else was swept."""
        if self.by:
            return list(self.by)
        keys = [key for key in self.swept if key not in REPLICATE_KEYS]
        return keys if keys or len(self.records) > 1 else list(self.swept)

    @cached_property
    def settings(self) -> list[Setting]:
        """The points grouped over their replicates, in the order of their first points."""
        groups: dict[tuple[Value, ...], list[Record]] = {}
        for record in self.records:
            groups.setdefault(tuple(self.value(record, key) for key in self.keys), []).append(record)
        others = [key for key in self.swept if key not in (*self.keys, *REPLICATE_KEYS)]
        return [
            Setting(dict(zip(self.keys, values, strict=True)), records, self._differ(records, others))
            for values, records in groups.items()
        ]

    def _differ(self, records: Sequence[Record], keys: Sequence[str]) -> bool:
        """Whether points differ in some of these keys."""
        return len({tuple(self.value(record, key) for key in keys) for record in records}) > 1

    @cached_property
    def measured(self) -> list[Setting]:
        """The settings whose main metric is a finite number."""
        return [setting for setting in self.settings if setting.estimate(self.metric).count]

    def values_of(self, key: str) -> list[Value]:
        """The different values that settings have of a key, in the order of the settings."""
        return list(dict.fromkeys(setting.values[key] for setting in self.settings))

    def varied_keys(self, settings: Sequence[Setting]) -> list[str]:
        """The keys whose values differ between settings."""
        return [key for key in self.keys if len({setting.values[key] for setting in settings}) > 1]

    @cached_property
    def ranked(self) -> list[Setting]:
        """The settings, the best first, then trials, those without a finite value, and those that failed.

        Of those that a race dropped, the one comes first that came furthest.
        """

        def rank(setting: Setting) -> tuple[bool, bool, bool, float]:
            mean = setting.estimate(self.metric).mean
            if math.isnan(mean):
                reached = max((record.dropped or 0 for record in setting.finished), default=0)
                return not setting.finished, True, setting.is_trial, -reached
            return not setting.finished, False, setting.is_trial, mean if self.minimized else -mean

        return sorted(self.settings, key=rank)

    @property
    def minimized(self) -> bool:
        """Whether less of the main metric is better."""
        return self.direction == "minimize"

    @cached_property
    def best_setting(self) -> Setting | None:
        """The setting with the best mean; None of several objectives, or where no direction is known."""
        if not self.judged or self.objectives or math.isnan(self.ranked[0].estimate(self.metric).mean):
            return None
        return self.ranked[0]

    @property
    def best(self) -> Record | None:
        """The best point of the best setting, or None."""
        if self.best_setting is None:
            return None
        measured = [
            r for r in self.best_setting.finished if math.isfinite(r.metrics.get(self._metric, math.nan))
        ]
        sign = -1 if self.minimized else 1
        return max(measured, key=lambda r: sign * r.metrics[self._metric])

    @cached_property
    def method_key(self) -> str | None:
        """The swept key that names methods, or None if no other key was swept.

        None, too, where a race dropped points: it looks for the best point, and not for that of each method.
        """
        if self.best_setting is None or len(self.keys) < 2 or self.dropped:
            return None
        return next((key for key in METHOD_KEYS if key in self.keys), None)

    @cached_property
    def best_of_each(self) -> Results | None:
        """The results of the best setting of each method, the best first; None for a single method."""
        if self.method_key is None or len(self.chosen_settings) == len(self.settings):
            return None  # one setting for each method is the whole table
        records = [record for setting in self.chosen_settings for record in setting.records]
        return replace(self, title=f"the best of each {self.method_key}", records=records)

    @cached_property
    def chosen_settings(self) -> list[Setting]:
        """The best setting of each method, the best first; of all where none is compared or points race."""
        if self.best_setting is None:
            return []
        best: dict[Value, Setting] = {}
        for setting in self.ranked:
            if setting.estimate(self.metric).count and not setting.is_trial:
                best.setdefault(None if self.dropped else self.method_of(setting), setting)
        return list(best.values())

    def method_of(self, setting: Setting) -> Value:
        """The method of a setting: its recipe, and what learned its weights; None without names."""
        values = [setting.values[key] for key in METHOD_KEYS if key in self.keys]
        named = [value for value in values if value not in (None, NOTHING)]
        return (
            ", ".join(as_text(value, ALL_DIGITS) for value in named)
            if len(named) > 1
            else (named or values or [None])[0]
        )

    @property
    def protocol(self) -> str | None:
        """On which data points were chosen and reported, as a sentence; None if that is not known."""
        return protocol_of(self.finished) if self.judged and not self.chosen else None

    @property
    def notes(self) -> list[str]:
        """Remarks about the sweep, and about points, such as that an input of one has changed."""
        remarks = list(dict.fromkeys(f"{r.name}: {r.note}" for r in self.records if r.note))
        return [*self.remarks, *remarks, *self._inputs]

    @property
    def _inputs(self) -> list[str]:
        """The inputs of the points, where they differ: a line for each set of inputs."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for record in self.finished:
            if self.mode in _BY_EXPERT:
                break  # the table says it
            groups.setdefault(tuple(record.inputs), []).append(record.name)
        if len(groups) < 2:
            return []
        lines = [
            f"inputs of {', '.join(named[:3])}{' ...' * (len(named) > 3)}: {', '.join(names)}"
            for names, named in groups.items()
        ]
        more = [f"inputs: {counted(len(lines) - 10, 'more set')}"] if len(lines) > 10 else []
        return [*lines[:10], *more]

    @property
    def made_with(self) -> list[str]:
        """What points were made with that is otherwise here; see `Setting.made_with`."""
        return list(dict.fromkeys(words for setting in self.settings for words in setting.made_with))

    @property
    def references(self) -> dict[str, dict[str, float]]:
        """The metrics of the inputs, by name; of several sets of experts the means over the sets."""
        means = {name: _means([*sets.values()]) for name, sets in self.references_by_set.items()}
        return {name: values for name, values in means.items() if values}

    @cached_property
    def references_by_set(self) -> dict[str, dict[int | None, dict[str, float]]]:
        """The metrics of the inputs, by name and by the set of experts of the points that have them."""
        inputs: dict[str, dict[int | None, dict[str, float]]] = {}
        for record in self.records:
            number = self.expert_set(record)
            for name, values in record.references.items():
                inputs.setdefault(name, {}).setdefault(number, {}).update(values)
        return inputs

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the metrics: the main one, on how many examples, where it is reported, the others."""
        names = dict.fromkeys(m for r in self.records for m in r.metrics)
        main = [*self.objectives] or [self._metric]
        splits = {r.report_split for r in self.finished if r.reported}
        reported = [f"{split}/{metric}" for metric in main for split in sorted(map(str, splits))]
        first = [m for m in (*main, *_ON_HOW_MUCH, *reported) if m in names]
        return [*first, *(m for m in names if m not in first)]

    @cached_property
    def shown_metrics(self) -> list[str]:
        """The metrics to show by default: those of the evaluators, or else of the weights."""
        if self.shown:
            return list(self.shown)
        own = (self.metric, *_ON_HOW_MUCH)
        shown = [m for m in self.metrics if m in own or not m.startswith((*MERGE_PREFIXES, RACE))]
        if len(shown) > 1 or self.judged:
            return shown
        weights = ("weights/relative_change", "weights/cosine")
        return [m for m in self.metrics if m.startswith(weights)] or shown

    def heading(self, key: str) -> str:
        """The heading of a swept key's column in a table."""
        return _ABLATIONS.get(self.mode or "", key) if key in _APART else key

    def cell(self, setting: Setting, key: str) -> str:
        """The text of a setting's value of a swept key, for a table."""
        undisturbed = key in _APART and self.mode in _ABLATIONS
        return as_text(setting.values[key], ALL_DIGITS) or ("none" if undisturbed else MISSING)

    @property
    def has_replicates(self) -> bool:
        """Whether a setting has several points."""
        return any(len(setting.records) > 1 for setting in self.settings)

    @property
    def _metric(self) -> str:
        return self.metric or ""

    def unit(self, metric: str | None) -> str:
        """The unit of a metric; an empty string if it is unknown or the metric is a plain number."""
        declared = next((r.units[metric] for r in self.finished if metric and metric in r.units), "")
        return declared or next((u for start, u in _UNITS.items() if (metric or "").startswith(start)), "")

    def text(self, record: Record, key: str) -> str:
        """The text of a point's last override of a swept key; an empty string if there is none."""
        for override in reversed(record.overrides):
            name, _, text = override.lstrip("+").partition("=")
            if name == key:
                return text
        return ""

    def expert_set(self, record: Record) -> int | None:
        """The number of a point's set of experts; None unless sets are replicates."""
        number = self.value(record, SET_KEY)
        return number if isinstance(number, int) else None

    def value(self, record: Record, key: str) -> Value:
        """A point's value of a swept key; None if the point does not set it."""
        return parse_value(self.text(record, key))


def _means(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric, over those that have it."""
    columns = {metric: [m[metric] for m in measured if metric in m] for m in measured for metric in m}
    return {
        metric: values[0] if len(set(values)) == 1 else sum(values) / len(values)
        for metric, values in columns.items()
    }


_ON_HOW_MUCH = (RACE_EXAMPLES, RACE_FIDELITY)
_UNITS = {
    RACE_EXAMPLES: "examples",
    "time/": "s",
    "io/bytes_per_second": "B/s",
    "io/bytes": "B",
    "memory/": "B",
    "weights/relative_change": "fraction of the input's norm",
    "weights/cosine": "cosine, −1 to 1",
    "weights/distance": "Euclidean norm",
}

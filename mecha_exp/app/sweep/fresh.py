"""`sweep.fresh`: measures the chosen setting again with new seeds or sets of experts, which chose nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.config.compose import Composer
from mecha_exp.app.config.grid import Grid
from mecha_exp.app.config.jobs import enter
from mecha_exp.app.preparation import prepare_job
from mecha_exp.app.sweep.holdout import Chosen, models_of_chosen
from mecha_exp.app.sweep.replicates import EXPERTS, SEED_KEYS, checked_names, replicate_kinds, sets_of
from mecha_exp.app.words.plain_data import resolved
from mecha_exp.app.workbench import Workbench
from mecha_exp.errors import ConfigError, MechaError, counted
from mecha_exp.evaluation import Scoring
from mecha_exp.lab.points import EXPERTS_KEY, SET_KEY, as_text, with_each_set
from mecha_exp.numbers import is_whole
from mecha_exp.report.settings import Setting
from mecha_exp.report.sweep_results import results_of
from mecha_exp.runs.outcomes import FRESH_FILE, POINT, read_outcomes, write_outcomes
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.sources.search import find_model, folders_of
from mecha_exp.terminal.console import print_line, show_error

LEAST = 2


@dataclass(frozen=True)
class NewReplicates:
    """What `sweep.fresh` asks for, and the points of the sweep.

    Attributes:
        asked: a number of seeds, or lists of experts as `models.sets` has them; None for nothing.
        config: of the sweep.
        jobs: the overrides of each point.
        points: their configurations.
        composer: makes those of new points.
    """

    asked: Any
    config: DictConfig
    jobs: Sequence[Sequence[str]]
    points: Grid
    composer: Composer

    @cached_property
    def sets(self) -> list[Any]:
        """The new sets of experts; none where seeds are asked for."""
        return resolved(self.asked) if OmegaConf.is_list(self.asked) else []

    @property
    def _what(self) -> str:
        return f"sweep.fresh={as_text(self.sets) if self.sets else self.asked}"

    def check(self, scoring: Scoring) -> None:
        """Check that new replicates of the chosen setting can be measured, where they are asked for.

        Raises:
            ConfigError: there is no split to report on, no number of seeds, no recipe that draws, or the sets
                cannot be replicates of those of the sweep.
        """
        if self.asked is None:
            return
        if OmegaConf.is_list(self.asked):
            self._check_sets()
        elif not is_whole(self.asked, LEAST):
            raise ConfigError(
                f"{self._what}: expected how many new seeds to run, {LEAST} or more, or lists of experts."
            )
        if scoring.report_split is None or scoring.objectives:
            raise ConfigError(
                f"{self._what} measures the one chosen setting on data that did not choose it. "
                "It needs one metric and an evaluator with two splits. Leave it out."
            )
        if not self.sets and EXPERTS in replicate_kinds(self.config):
            raise ConfigError(
                f"{self._what} gives new seeds, and the replicates of this sweep are sets of experts. "
                "List new sets, as in sweep.fresh=[[a5.safetensors,b5.safetensors],"
                "[a6.safetensors,b6.safetensors]]."
            )
        if not self.sets and not any(_seed_of(config) is not None for config in self.points.first_of_each):
            raise ConfigError(f"{self._what}: no recipe of this sweep has a seed. Leave it out.")

    def _check_sets(self) -> None:
        """Check that the new sets exist, and are replicates of those of the sweep."""
        if EXPERTS not in replicate_kinds(self.config):
            raise ConfigError(
                "sweep.fresh lists sets of experts, and the points of this sweep have no others: name theirs "
                "in models.sets, with sweep.replicate=[experts]."
            )
        if len(self.sets) < LEAST:
            raise ConfigError(f"{self._what}: expected {LEAST} sets or more.")
        self._all_sets()
        folders = folders_of({"models": resolved(self.config.models)})
        for expert in itertools.chain(*self.sets):
            find_model(str(expert), folders)

    def _all_sets(self) -> list[list[str]]:
        """The sets of the sweep, then the new ones; those that a point has are its index."""
        own = resolved(self.config.models.get("sets"))
        try:
            return sets_of([*own, *self.sets])
        except ConfigError as error:
            raise ConfigError(f"{self._what} after the sets of the sweep: {error}") from None

    def measure(self, sweep: Sweep, folder: Path, bench: Workbench) -> bool:
        """Merge the chosen setting with new replicates and write `FRESH_FILE`, unless that is there.

        Returns:
            whether all could be measured; also where nothing is to be measured.
        """
        setting = results_of(sweep, folder, ended=True).best_setting if self.asked else None
        path = folder / FRESH_FILE
        try:
            points = list(self._points(sweep, folder, bench, setting)) if setting else []
            if points:
                _measure(points, path, bench)
        except MechaError as error:
            show_error(f"{self._what}: {error}")
            return False
        if setting and not points:
            print_line(f"{self._what}: '{setting.name}' draws no random numbers: no new seeds")
        if not points:
            path.unlink(missing_ok=True)
        return True

    def _points(self, sweep: Sweep, folder: Path, bench: Workbench, setting: Setting) -> Iterator[Chosen]:
        """The chosen setting with seeds, and sets of experts, that no point of the sweep has."""
        of_it = setting.finished[0]
        records = sweep.records(folder).items()
        number = next(int(path.name) for path, record in records if record.signature == of_it.signature)
        replicates = self._with_new_sets(self.jobs[number])
        if _seed_of(self.points[number]) is not None:
            replicates = self._with_new_seeds(replicates, self.points[number])
        elif not self.sets:
            return
        grid = Grid.of([words for words, _ in replicates], self.composer)
        for place, ((_, label), config) in enumerate(zip(replicates, grid.in_turn(), strict=True)):
            if self.sets:
                OmegaConf.update(config, "models.sets", self._all_sets())
            enter(config)
            point = bench.sign(prepare_job(config, folder / f"fresh-{place}"))
            scoring = point.scoring.on(str(of_it.report_split))
            record = Record(f"{setting.name} ({label})")
            yield Chosen(record, replace(point, scoring=scoring, output=None))

    def _with_new_sets(self, words: Sequence[str]) -> list[tuple[list[str], str]]:
        """The overrides of a point for each new set, and its label; as often as seeds are asked for."""
        if not self.sets:
            return [([*words], "")] * self.asked
        rest = _without(words, SET_KEY, EXPERTS_KEY)
        point = dict(word.split("=", 1) for word in rest)
        sets = self._all_sets()
        listed = with_each_set([point], checked_names([point], sets))[-len(self.sets) :]
        first = len(sets) - len(self.sets)
        return [
            ([f"{key}={text}" for key, text in of_set.items()], f"experts={first + place}")
            for place, of_set in enumerate(listed)
        ]

    def _with_new_seeds(
        self, replicates: Sequence[tuple[list[str], str]], config: DictConfig
    ) -> list[tuple[list[str], str]]:
        """Give each replicate a seed of its own that no point of the sweep has."""
        key = next(k for k in SEED_KEYS if OmegaConf.select(config, k) is not None)
        used = [seed for seed in map(_seed_of, self.points.in_turn()) if seed is not None]
        return [
            ([*_without(words, key), f"++{key}={seed}"], ",".join(filter(None, [f"seed={seed}", label])))
            for seed, (words, label) in enumerate(replicates, max(used) + 1)
        ]


def _without(words: Sequence[str], *keys: str) -> list[str]:
    """Overrides but for those of some keys."""
    return [word for word in words if word.lstrip("+").partition("=")[0] not in keys]


def _seed_of(config: object) -> int | None:
    """The seed of a configuration; None if its recipe draws no random numbers."""
    seeds = (OmegaConf.select(config, key) for key in SEED_KEYS)  # type: ignore[arg-type]
    return next((seed for seed in seeds if isinstance(seed, int)), None)


def _measure(fresh: Sequence[Chosen], path: Path, bench: Workbench) -> None:
    """Write the outcomes of new points; those that were written by an earlier start are kept."""
    names = {candidate.record.name for candidate in fresh}
    if path.is_file() and not bench.measures_again and {part.name for part in read_outcomes(path)} == names:
        return
    print_line(f"measuring the chosen setting with {counted(len(fresh), 'new replicate')}")
    rows = []
    for candidate, merged in models_of_chosen(fresh, bench):
        if isinstance(merged, Exception):
            raise merged
        measured = bench.measurements.of_point(candidate.point, merged)
        rows += measured.rows(POINT, candidate.record.name, candidate.point.expert_set)
        merged.release()
    write_outcomes(rows, path)

"""Reads the settings of `sweep=search`, and says what is wrong with them before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.batch import MOST_POINTS, plan_batches
from mecha_exp.app.config.jobs import Jobs
from mecha_exp.app.point import Point
from mecha_exp.app.search.known_results import known_trials
from mecha_exp.app.search.samplers import checked_sampler, require_optuna
from mecha_exp.app.search.search import Search
from mecha_exp.app.search.space import Parameters, Space
from mecha_exp.app.search.storage import open_shared
from mecha_exp.app.sweep.settings import checked_count, require_numbered_folders
from mecha_exp.app.words.plain_data import resolved
from mecha_exp.app.workbench import Workbench
from mecha_exp.errors import ConfigError, counted, did_you_mean, prefixed
from mecha_exp.evaluation import Scoring
from mecha_exp.evaluation.declaration import DIRECTIONS
from mecha_exp.lab.points import Setting

BATCHES = 10
"""How many batches `sweep.batch=auto` makes at least: a sampler learns between batches only."""


def search_of(
    space: Space,
    config: DictConfig,
    point: Point,
    scoring: Scoring,
    words: Callable[[Setting], list[str]],
    jobs_of: Callable[[Sequence[Sequence[str]]], Jobs],
    title: str,
    bench: Workbench,
) -> Search:
    """The search that a configuration asks for.

    Args:
        space: what is searched.
        config: of a point, with the settings of `sweep`.
        point: one of its points.
        scoring: what measures it.
        words: makes the overrides of a point from what it sets.
        jobs_of: makes the jobs of points from their overrides.
        title: of the sweep.
        bench: of this process.

    Raises:
        ConfigError: anything that is wrong with it; nothing has been written then.
    """
    settings = config.sweep
    require_numbered_folders(config, "a search")
    objectives = _checked_objectives(settings.direction, scoring)
    trials = checked_count("sweep.trials", settings.trials)
    if trials > space.size:
        raise ConfigError(
            f"sweep.trials={trials}, and the space has only {counted(int(space.size), 'point')}. Run them "
            f"all with sweep=grid -m, or ask for sweep.trials={space.size:.0f} at most."
        )
    require_optuna()
    options = resolved(settings.options) or {}
    if not isinstance(options, dict):
        raise ConfigError("sweep.options: expected a mapping, as in sweep.options={n_startup_trials:20}.")
    named = {str(key): value for key, value in options.items()}
    sampler = checked_sampler(settings.sampler, settings.seed, named, space, len(objectives))
    enqueued = _enqueued(settings.enqueue, space, trials)
    batch = _batch_size(settings.batch, trials, point)
    url, name = settings.storage, str(config.name or title)
    shared = None
    if url is not None:
        identity = {"metric": list(objectives), "evaluator": scoring.keys, "merge": bench.sign(point).digest}
        shared = open_shared(str(url), name, space, list(objectives.values()), identity)
    is_wanted = _wants_known(settings.known, bench)
    find = partial(known_trials, space, words, jobs_of, bench) if is_wanted else list
    return Search(space, sampler, trials, batch, objectives, enqueued, words, shared, name, find)


def _wants_known(value: Any, bench: Workbench) -> bool:
    """Whether a search begins with the results that the store has."""
    if value not in (True, False):
        raise ConfigError(f"sweep.known={value}: expected true or false.")
    if value and (bench.store is None or bench.measures_again):
        raise ConfigError(
            "sweep.known=true begins with the results of the store, and there is no store (store=null), or "
            "its results are to be made again (rerun=...). Leave one of the two out."
        )
    return bool(value)


def _checked_objectives(direction: Any, scoring: Scoring) -> dict[str, str]:
    """The metrics that decide, after a check of their directions."""
    if scoring.metric is None:
        raise ConfigError(
            "sweep=search needs a metric as its objective: choose an evaluator with evaluator=..."
        )
    objectives = dict(scoring.objectives) or {scoring.metric: scoring.direction}
    if direction is None:
        return objectives
    words = list(direction) if OmegaConf.is_list(direction) else [direction] * len(objectives)
    if len(words) != len(objectives):
        raise ConfigError(
            f"sweep.direction={direction}: expected a direction for each of {', '.join(objectives)}. Leave "
            "it out, since it only checks those of the evaluator."
        )
    for word, (metric, better) in zip(words, objectives.items(), strict=True):
        if word not in DIRECTIONS:
            hint = did_you_mean(str(word), DIRECTIONS)
            raise ConfigError(f"sweep.direction={direction}: expected {' or '.join(DIRECTIONS)}.{hint}")
        if word != better:
            raise ConfigError(
                f"sweep.direction={direction} looks for the worst {metric}, whose evaluator says {better}. "
                "Leave sweep.direction out."
            )
    return objectives


def checked_reference(value: Any, scoring: Scoring) -> list[float]:
    """The reference point of the hypervolume, a number for each objective; empty for the worst values.

    Raises:
        ConfigError: there is one objective, or it is not a number for each.
    """
    if value is None:
        return []
    numbers = list(value) if OmegaConf.is_list(value) else []
    if not scoring.objectives:
        raise ConfigError(
            f"sweep.reference={value}: one metric has no hypervolume. Name several with "
            "evaluator.metric=[a,b], or leave it out."
        )
    is_point = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    if not is_point or len(numbers) != len(scoring.objectives):
        raise ConfigError(
            f"sweep.reference={value}: expected a number for each of {', '.join(scoring.objectives)}, as in "
            f"[{','.join('0' for _ in scoring.objectives)}]."
        )
    return [float(number) for number in numbers]


def _batch_size(value: Any, trials: int, point: Point) -> int:
    """The number of trials in a batch; `auto` is a tenth of all, and no more than a pass holds."""
    if value != "auto":
        return checked_count("sweep.batch", value)
    most = max(1, min(MOST_POINTS, -(-trials // BATCHES)))
    batches, _ = plan_batches([replace(point) for _ in range(most)])
    return len(batches[0].points) if batches else most


def _enqueued(value: Any, space: Space, trials: int) -> list[Parameters]:
    points = resolved(value) or []
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise ConfigError("sweep.enqueue: expected points, as in sweep.enqueue=[{alpha:0.5},{alpha:1}].")
    if len(points) > trials:
        raise ConfigError(f"sweep.enqueue has {len(points)} points, and sweep.trials={trials} is fewer.")
    with prefixed("sweep.enqueue: "):
        return [space.parameters(point) for point in points]

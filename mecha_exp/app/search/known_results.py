"""Results of the store that lie in the space of a search: it begins with them, and they cost nothing.

What the store knows has a signature, from which no settings can be read. So the settings of the runs that
made its merges are looked up in their folders, and each one that lies in the space is a point whose signature
the store is asked for. Only a point of which it has merge and measurements is known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from mecha_exp.app.config.jobs import Jobs, enter
from mecha_exp.app.point import Point
from mecha_exp.app.preparation import prepare_job
from mecha_exp.app.search.space import Parameters, Space
from mecha_exp.app.search.trials import KNOWN, Trial
from mecha_exp.app.sweep.hyperparameters import GROUP
from mecha_exp.app.words.plain_data import entry
from mecha_exp.app.workbench import Workbench
from mecha_exp.errors import ConfigError, MechaError
from mecha_exp.lab.points import Setting
from mecha_exp.runs.record import Record, read_settings

log = logging.getLogger(__name__)


def known_trials(
    space: Space, words: Callable[[Setting], list[str]], jobs_of: Callable[..., Jobs], bench: Workbench
) -> list[Trial]:
    """The points of a space whose results are stored, without values, each setting once.

    Args:
        space: what is searched.
        words: makes the overrides of a point from what it sets.
        jobs_of: makes the jobs of points from their overrides.
        bench: with the store.
    """
    candidates = list(_candidates(space, bench))
    jobs = jobs_of([words(space.setting(parameters)) for parameters in candidates])
    known = []
    for number, job in jobs.in_turn(range(len(jobs))):
        try:
            point = bench.sign(prepare_job(job.config, enter(job.config), job.written))
            is_known = _is_stored(point, bench)
        except MechaError as error:
            log.debug("%s: %s", candidates[number], error)
            continue
        if is_known:
            known.append(Trial(candidates[number], {KNOWN: True}))
    return known


def _is_stored(point: Point, bench: Workbench) -> bool:
    """Whether the store has all of a point, so that it costs nothing."""
    return bench.recall(point) is not None and bench.measurements.are_stored(point)


def _candidates(space: Space, bench: Workbench) -> Iterator[Parameters]:
    """The parameters of stored merges that lie in a space, as their runs' folders tell them."""
    seen = set()
    for merge in bench.store or ():
        folder = Path(merge.folder)
        try:
            config = read_settings(folder)
            recipe = Record.load(folder).parameters.get(GROUP)
        except ConfigError:  # the folder is gone
            continue
        parameters = _parameters(space, config, str(recipe))
        identity = tuple(parameters.items()) if parameters else None
        if parameters and identity not in seen:
            seen.add(identity)
            yield parameters


def _parameters(space: Space, config: Mapping[str, Any], recipe: str) -> Parameters | None:
    """The values of the keys that are searched in a configuration; None where they are not in the space."""
    branch = recipe if recipe in space.branches else ""
    if branch not in space.branches:
        return None
    point: dict[str, Any] = {}
    for dimension in space.dimensions:
        if dimension.key == GROUP:
            point[GROUP] = recipe
        elif dimension.sign + dimension.key in space.branches[branch]:
            try:
                value = reduce(entry, dimension.key.split("."), config)
            except LookupError:
                return None
            if value is None or isinstance(value, dict | list):
                return None
            point[dimension.key] = value
    try:
        return space.parameters(point)
    except ConfigError:  # outside of the space
        return None

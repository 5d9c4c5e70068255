"""Optuna's study of a search: built from the trials so far, and asked for the next ones.

The study is built anew for each batch. So what comes next is a function of the trials, their values and the
seed, and a search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mecha_exp.app.search.samplers import SEQUENCE, Sampler
from mecha_exp.app.search.space import Dimension, Parameters, Space
from mecha_exp.app.search.trials import AT_RANDOM, ENQUEUED, KNOWN, Outcome, Trial
from mecha_exp.evaluation.racing import Dropped
from mecha_exp.system.optuna_log import quiet_optuna

if TYPE_CHECKING:
    import optuna

_NAME = "search"
_ATTEMPTS = 20
"""How often a sampler may repeat a trial before a new one is drawn at random."""
_LISTED = 10_000
"""The size of the largest finite space whose points are listed to draw one of them."""
_SEQUENCE_STATE = "sequence"
_OURS = (_SEQUENCE_STATE, AT_RANDOM, KNOWN, ENQUEUED)


def next_trials(
    space: Space,
    sampler: Sampler,
    directions: Sequence[str],
    earlier: Sequence[Trial],
    count: int,
    enqueued: Sequence[Parameters] = (),
    known: int = 0,
) -> list[Trial]:
    """The trials that the sampler asks for after the earlier ones; no two trials have one setting.

    Args:
        space: what is searched; it has at least `count` points beside the earlier ones.
        sampler: by name.
        directions: `maximize` or `minimize`, for each objective.
        earlier: all trials so far, with their values.
        count: how many trials to ask for.
        enqueued: the parameters, some or all, of the first trials of the search.
        known: how many of the earlier ones were there before it.
    """
    with quiet_optuna():
        study = _study(space, sampler, directions, earlier)
        for parameters in enqueued[len(earlier) - known :][:count]:
            study.enqueue_trial(parameters)
        is_random = sampler.draws_at_random(earlier)
        taken = {_identity(space, trial.parameters) for trial in earlier}
        trials: list[Trial] = []
        for number in range(len(earlier), len(earlier) + count):
            with sampler.errors_named():
                trial, parameters = _ask(study, space, taken, f"{sampler.seed} {number}")
            taken.add(_identity(space, parameters))
            state = _state(study, trial.number, sampler)
            if number - known < len(enqueued):
                state[ENQUEUED] = True
            elif is_random:
                state[AT_RANDOM] = True
            trials.append(Trial(parameters, state))
        return trials


def frozen_trial(space: Space, trial: Trial, **attributes: Any) -> optuna.trial.FrozenTrial:
    """A trial in Optuna's form; `attributes` go to `create_trial`. Without an outcome it has failed, or runs.

    A dropped one is pruned, and its intermediate value is the score on the examples that it was measured on.
    """
    import optuna

    by_key = {d.key: d for d in space.dimensions}
    states = optuna.trial.TrialState
    ended = states.PRUNED if trial.dropped else states.FAIL if trial.values is None else states.COMPLETE
    reached = {trial.dropped.examples: trial.dropped.score} if trial.dropped else {}
    return optuna.trial.create_trial(
        state=states.RUNNING if trial.running else ended,
        values=trial.values,
        intermediate_values=reached,
        params=trial.parameters,
        distributions={key: _distribution(by_key[key]) for key in trial.parameters},
        **attributes,
    )


def outcome_of(frozen: optuna.trial.FrozenTrial) -> Outcome:
    """The outcome of a trial of Optuna's; the other direction of `frozen_trial`."""
    import optuna

    if frozen.state == optuna.trial.TrialState.PRUNED and frozen.intermediate_values:
        return Dropped(*max(frozen.intermediate_values.items()))
    return tuple(frozen.values) if frozen.values else None


def _study(
    space: Space, sampler: Sampler, directions: Sequence[str], trials: Sequence[Trial]
) -> optuna.Study:
    import optuna

    storage = optuna.storages.InMemoryStorage()
    optuna_sampler = sampler.make(len(trials))
    study = optuna.create_study(
        storage=storage, study_name=_NAME, sampler=optuna_sampler, directions=directions
    )
    for trial in trials:
        state = {key: value for key, value in trial.state.items() if key not in _OURS}
        study.add_trial(frozen_trial(space, trial, system_attrs=state))
    for key, value in (trials[-1].state.get(_SEQUENCE_STATE, {}) if trials else {}).items():
        storage.set_study_system_attr(storage.get_study_id_from_name(_NAME), key, value)
    return study


def _ask(
    study: optuna.Study, space: Space, taken: set[frozenset[tuple[str, str]]], seed: str
) -> tuple[optuna.Trial, Parameters]:
    """Ask for a trial that is not taken; draw one where the sampler only repeats itself."""
    import optuna

    chance = random.Random(seed)
    unasked: list[Parameters] = []
    for attempt in range(1_000_000):
        trial = study.ask()
        parameters = space.draw(partial(_suggest, trial))
        if _identity(space, parameters) not in taken:
            return trial, parameters
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        if attempt < _ATTEMPTS:
            continue
        if space.size <= _LISTED and not unasked:
            unasked = [p for p in space.all_parameters() if _identity(space, p) not in taken]
        study.enqueue_trial(chance.choice(unasked) if unasked else _at_random(space, chance))
    raise AssertionError("the space has fewer points than trials were asked for")


def _at_random(space: Space, chance: random.Random) -> Parameters:
    import optuna

    sampler = optuna.samplers.RandomSampler(seed=chance.randrange(2**32))
    return space.draw(partial(_suggest, optuna.create_study(sampler=sampler).ask()))


def _identity(space: Space, parameters: Parameters) -> frozenset[tuple[str, str]]:
    return frozenset(space.setting(parameters).items())


def _state(study: optuna.Study, number: int, sampler: Sampler) -> dict[str, Any]:
    """The notes of the sampler on a trial, and the trial's place in a sequence."""
    state = dict(study.get_trials(deepcopy=False)[number].system_attrs)
    if sampler.name == SEQUENCE:
        state[_SEQUENCE_STATE] = study._storage.get_study_system_attrs(study._study_id)
    return state


def _suggest(trial: optuna.Trial, dimension: Dimension) -> Any:
    d = dimension
    if d.choices:
        return trial.suggest_categorical(d.key, d.choices)
    if d.is_integer:
        return trial.suggest_int(d.key, int(d.low), int(d.high), step=int(d.step or 1), log=d.logarithmic)
    return trial.suggest_float(d.key, d.low, d.high, step=d.step, log=d.logarithmic)


def _distribution(dimension: Dimension) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    d = dimension
    if d.choices:
        return distributions.CategoricalDistribution(d.choices)
    if d.is_integer:
        return distributions.IntDistribution(int(d.low), int(d.high), d.logarithmic, int(d.step or 1))
    return distributions.FloatDistribution(d.low, d.high, d.logarithmic, d.step)

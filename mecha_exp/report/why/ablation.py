"""What the blocks of a model contribute: each left out of the merge, or merged alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mecha_exp.report.results import BLOCK_KEY, Results
from mecha_exp.report.settings import Estimate
from mecha_exp.report.verdict import candidates_of, splits_of
from mecha_exp.runs.outcomes import ModelOutcomes
from mecha_exp.runs.values import Value

MODES = {
    "leave_one_block_out": "lost where the block is left out of the merge",
    "only_one_block": "gained where the block alone is merged",
}
"""The modes of such sweeps, with what a figure says of the change."""


def block_effects(results: Results) -> dict[str, Estimate]:
    """The change of the main metric by each block, in the order of the points.

    A point is compared with the undisturbed point of the same seed and other settings, whose effects cancel.
    Intervals are those of `results.changes`, over examples too, or else over the points of a block.
    """
    changes: dict[str, list[float]] = {}
    if results.mode in MODES:
        for block, change in _changes(results):
            changes.setdefault(block, []).append(change)
    estimates = {block: Estimate.of(values) for block, values in changes.items()}
    return {block: replace(e, ci95=results.changes.get(block)) for block, e in estimates.items()}


def _changes(results: Results) -> Iterator[tuple[str, float]]:
    """Each block of each point with the change that it makes."""
    others = [key for key in results.swept if key != BLOCK_KEY]
    whole, apart = {}, list[tuple[str, tuple[Value, ...], float]]()
    for record in results.finished:
        setting = tuple(results.value(record, key) for key in others)
        measured = record.metrics.get(str(results.metric), math.nan)
        if block := results.text(record, BLOCK_KEY):
            apart.append((block, setting, measured))
        else:
            whole[setting] = measured
    for block, setting, measured in apart:
        if setting in whole:
            yield block, _sign(results) * (measured - whole[setting])


def _sign(results: Results) -> int:
    """Whether a block's change is the point less the undisturbed one, or the other way round."""
    return 1 if results.mode == "only_one_block" else -1


def intervals_of_changes(results: Results, models: Sequence[ModelOutcomes]) -> dict[str, tuple[float, float]]:
    """The 95 % interval of each block's change, over the examples that both points share and over replicates.

    Empty where the evaluator gives one number for each model, and where another key than the block was swept
    too, so that a block has several changes.

    Args:
        results: of the sweep.
        models: the outcomes, as `outcomes_of_sweep` reads them.
    """
    if results.mode not in MODES or results.keys != [BLOCK_KEY]:
        return {}
    from mecha_exp.verdict.candidates import comparable
    from mecha_exp.verdict.intervals import RESAMPLES
    from mecha_exp.verdict.panel import Panel
    from mecha_exp.verdict.scoring import measure

    split = splits_of(results)[0]
    points, _ = comparable(candidates_of(results, models), split)
    blocks = {point.name: str(point.settings[BLOCK_KEY] or "") for point in points}
    whole = next((name for name, block in blocks.items() if not block), None)
    if whole is None or len(blocks) < 2:
        return {}
    panel, sign = Panel.of(points, split), _sign(results)
    apart = [name for name in panel.names if blocks[name]]
    pairs = [(panel.index(name), panel.index(whole))[::sign] for name in apart]
    measured = measure(panel, np.array(pairs, dtype=np.intp), {}, resamples=RESAMPLES, seed=0)
    return {blocks[name]: change.ci95 for name, change in zip(apart, measured.differences, strict=True)}

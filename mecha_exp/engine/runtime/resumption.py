"""Resumes an interrupted merge: what must be equal, which keys are done, and their notes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from mecha_exp._version import __version__
from mecha_exp.checkpoint import Note
from mecha_exp.engine.code_hash import code_hash, contents_of_paths, reader_hashes
from mecha_exp.engine.ir.model_values import walk_through
from mecha_exp.engine.options import SETTINGS
from mecha_exp.engine.planner.keys.key_plan import KeyPlan
from mecha_exp.engine.planner.meaning import in_numbers, recipe_in_numbers
from mecha_exp.engine.planner.plan import Plan
from mecha_exp.engine.scaled_fp8 import scale_key
from mecha_exp.engine.sinks import Sink
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import MergeNode, calls_of, models_of
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.recipe.text import serialize
from mecha_exp.system.texts import json_hash

if TYPE_CHECKING:
    from mecha_exp.engine.runtime.context import MergeStats, Progress


def resume_token(planned: Plan, number: int) -> str | None:
    """The hash of all that decides the bytes of a job's output, without reading the contents of its inputs.

    An input is known by its path, size, time of change and inode, a merge method by its code, blocks and
    presets by the number of each key, a model config by its content. None where that cannot be told: models
    in memory.
    """
    job, options = planned.jobs[number], planned.options
    models = models_of(job.recipe)
    inputs = [planned.sources[model].identity for model in models]
    if None in inputs:
        return None
    code = sorted({*map(code_hash, _methods(planned, number)), *reader_hashes().values()})
    files = sorted(content for call in calls_of(job.recipe) for content in contents_of_paths(call).values())
    dtype = in_numbers(job.dtype) if isinstance(job.dtype, ByKey) else job.dtype
    settings = [*(getattr(options, name) for name in SETTINGS), options.strict, dtype, job.quantize]
    recipe = serialize(recipe_in_numbers(job.recipe))
    parts = [recipe, inputs, dict(planned.configs), [*map(str, settings)], job.statistics, code, files]
    return json_hash([*parts, __version__, torch.__version__])


@dataclass
class Resumption:
    """The keys of a merge that an earlier run has finished, and their notes for the report.

    A key counts as finished when every output that wants it has it; otherwise it is made again for all.
    """

    sinks: Mapping[int, Sink]
    stats: MergeStats
    progress: Progress
    _unfinished: dict[str, int] = field(default_factory=dict)

    @cached_property
    def _resumes(self) -> bool:
        """Whether an earlier run has left anything."""
        return any(sink.finished for sink in self.sinks.values())

    def is_finished(self, key: KeyPlan) -> bool:
        """Whether there is nothing left to do for a key."""
        jobs = key.structure.jobs
        if not self._resumes:
            return not jobs
        return all(job in self.sinks and key.key in self.sinks[job].finished for job in jobs)

    def skips(self, key: KeyPlan) -> bool:
        """Whether there is nothing left to do for a key; the notes of a finished key are counted again."""
        if not self.is_finished(key):
            return False
        for job in key.structure.jobs:
            self._recall(job, key, self.sinks[job].finished[key.key])
        self.stats.resumed.append(key)
        self.progress(key.key, key.structure.bytes_read)
        return True

    def finish(self, keys: Sequence[KeyPlan]) -> None:
        """Record keys as finished in every output that has them, a stack once all its experts are."""
        notes: dict[int, dict[str, Note]] = {}
        for key in keys:
            if key.experts is not None and self._is_begun(key, key.experts):
                continue
            for job in key.structure.jobs:
                if job not in self.sinks:
                    continue
                if job in key.structure.quantised_by:
                    notes.setdefault(job, {})[scale_key(key.key)] = {}
                notes.setdefault(job, {})[key.key] = self._note(job, key)
        for job, of_job in notes.items():
            self.sinks[job].finish_together(of_job)

    def _is_begun(self, key: KeyPlan, experts: int) -> bool:
        """Count one more expert of a stack; whether others are still to come."""
        with self.stats.lock:
            self._unfinished[key.key] = self._unfinished.get(key.key, experts) - 1
            return bool(self._unfinished[key.key])

    def _note(self, job: int, key: KeyPlan) -> Note:
        stats, structure = self.stats, key.structure
        note: Note = {}
        if count := stats.nonfinite.get((job, key.key)):
            note["nonfinite"] = count
        if (peak := stats.peaks.get((job, key.key))) is not None:
            note["peak"] = min(peak, sys.float_info.max)  # JSON has no infinity
        if structure.program is None and key.key in stats.disagreeing:
            note["disagreeing"] = True
        models = [model for j, model, _ in structure.statistics if j == job]
        if models:
            note["moments"] = [stats.moments[job, model][key.key].tolist() for model in models]
        if job in structure.quantised_by:
            note["quantisation_error"] = stats.errors[job][key.key].tolist()
        return note

    def _recall(self, job: int, key: KeyPlan, note: Note) -> None:
        stats = self.stats
        if count := note.get("nonfinite"):
            stats.nonfinite[job, key.key] = count
        if (peak := note.get("peak")) is not None:
            stats.add_peak(job, key.key, peak)
        if note.get("disagreeing") and key.key not in stats.disagreeing:
            stats.disagreeing.append(key.key)
        if error := note.get("quantisation_error"):
            stats.errors.setdefault(job, {})[key.key] = torch.tensor(error, dtype=torch.float64)
        models = [model for j, model, _ in key.structure.statistics if j == job]
        for model, moments in zip(models, note.get("moments", []), strict=True):
            by_key = stats.moments.setdefault((job, model), {})
            by_key[key.key] = torch.tensor(moments, dtype=torch.float64)


def _methods(planned: Plan, number: int) -> set[MergeMethod]:
    """The merge methods that a job and its statistics come to, with those that composites are made of."""
    roots = {
        structure.program.roots[root]
        for structure in planned.structures
        if structure.program is not None
        for root in structure.roots_of(number)
    }
    whole = (planned.jobs[number].recipe, *roots)  # what lazy methods call is in the recipe alone
    return {node.method for node in walk_through(whole) if isinstance(node, MergeNode)}

"""Small keys that are computed together, as one tensor.

A tensor of ten elements takes torch a few microseconds, and all the work around it hundreds. So small keys
of one program are read, computed and written together, and then recorded together (see `ir/stacked_keys.py`).
Where reductions come first, or draws belong to the names of keys, these have one size.

This gives the same bytes only where a program computes every entry from those at its place and from small
values, with operations that round alike at every place of a tile. After an error or a value that is not
finite, the keys are made again one by one: then the message names the key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch

from mecha_exp.checkpoint import round_to, torch_dtype
from mecha_exp.engine.compiler.ops import OPERATIONS
from mecha_exp.engine.compiler.trace import Computed, Trace
from mecha_exp.engine.compiler.tracer import trace_program
from mecha_exp.engine.ir.program import Program
from mecha_exp.engine.ir.stacked_keys import can_be_stacked, run_stacked
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.keys.key_plan import KeyPlan, Structure
from mecha_exp.engine.runtime.buffers import Scratch, widen
from mecha_exp.engine.runtime.context import MergeContext
from mecha_exp.engine.runtime.key_pass import peaks_of
from mecha_exp.engine.runtime.key_tasks import tasks_of
from mecha_exp.engine.runtime.overflow import loses_digits_below, overflows_from
from mecha_exp.engine.runtime.scheduler import KeyTask, TileTask
from mecha_exp.errors import MechaError, MergeError
from mecha_exp.graph.nodes import Node
from mecha_exp.method_api.method import Reduction
from mecha_exp.random import uniform

MANY = 64
"""The keys of a program from which on it is worth finding out whether they can be computed together."""

TOGETHER = 1 << 17
"""Elements that are computed together, at most: as many as a tile that is streamed."""

HELD = 1 << 22
"""Elements of all values of a program that are held meanwhile, at most: 16 MB of them, or a key."""

MOST_DRAWS = 1 << 11
"""Elements of a key that are drawn together with those of others, at most.

Where there is a compiled loop, a key of DARE-TIES takes 0.12 ms by itself, of 1,024 elements as of 4,096.
Together with others it takes 0.09 ms of 1,024 elements, 0.16 ms of 2,048 and 0.23 ms of 4,096.
"""

_Kind: TypeAlias = tuple[object, ...]


def small_tasks(keys: Iterable[KeyPlan], context: MergeContext) -> Iterator[KeyTask]:
    """The tasks of small keys: those of one kind together, where that gives the same bytes."""
    for group in in_groups(keys, context.plan.structures, context.plan.options):
        if len(group) == 1:
            yield from tasks_of(group[0], context)
        else:
            yield ComputeTogether(group, context)


def in_groups(
    keys: Iterable[KeyPlan], structures: Mapping[Structure, int], options: EngineOptions
) -> Iterator[list[KeyPlan]]:
    """Keys in groups that can be computed together; the others by themselves.

    Args:
        structures: those of all keys, with how many keys each has.
    """
    kinds = _Kinds(structures, options)
    groups: dict[_Kind, list[KeyPlan]] = {}
    sizes: Counter[_Kind] = Counter()
    for key in keys:
        kind = kinds.of(key.structure)
        if kind is None:
            yield [key]
            continue
        if sizes[kind] + key.numel > kinds.most(key.structure):
            yield groups.pop(kind)
            sizes[kind] = 0
        groups.setdefault(kind, []).append(key)
        sizes[kind] += key.numel
    yield from groups.values()


class _Kinds:
    """The kinds of keys that can be computed together: those of one program and equal dtypes."""

    def __init__(self, structures: Mapping[Structure, int], options: EngineOptions) -> None:
        self._most = min(TOGETHER, options.tile_elements)
        counts: Counter[Program] = Counter()
        for structure, count in structures.items():
            if structure.program is not None:
                counts[structure.program] += count
        self._joinable = {program for program, n in counts.items() if n >= MANY and can_go_together(program)}
        self._of: dict[Structure, _Kind | None] = {}

    def of(self, structure: Structure) -> _Kind | None:
        """What keys that go together have in common; None where a key goes by itself."""
        if structure not in self._of:
            self._of[structure] = self._find(structure)
        return self._of[structure]

    def most(self, structure: Structure) -> int:
        """How many elements are computed together."""
        assert structure.program is not None
        return min(self._most, HELD // len(structure.program.extents))

    def _find(self, structure: Structure) -> _Kind | None:
        program = structure.program
        if program is None or program not in self._joinable or structure.numel > self.most(structure):
            return None
        if structure.experts is not None or structure.statistics or structure.scales:
            return None
        if structure.numel > MOST_DRAWS and _draws(program):
            return None
        size = structure.numel if _depends_on_keys(program) else None
        dtypes = (structure.stored[model].dtype for model in program.models)
        return id(program), id(structure.outputs), size, *dtypes


def _depends_on_keys(program: Program) -> bool:
    """Whether an entry depends on its key as well: on a reduction of it, or on draws that have its name."""
    return _draws(program) or any(isinstance(call.method, Reduction) for call in program.calls.values())


def _draws(program: Program) -> bool:
    return any(call.method is uniform for call in program.calls.values())


def can_go_together(program: Program) -> bool:
    """Whether a program computes every entry from those at its place, and rounds alike at every place.

    The tracer knows only operations that do; see `compiler/ops.py`. For what a method makes of small values
    alone they are looked for, where these differ from key to key.
    """
    signatures = [call.method.signature for call in program.calls.values() if call.method is not uniform]
    if not can_be_stacked(program) or any(s.wants_tile or s.wants_key for s in signatures):
        return False
    traces = trace_program(program)
    if any(pass_.by_rows or isinstance(trace, str) for pass_, trace in traces.items()):
        return False
    known = (small for trace in traces.values() if isinstance(trace, Trace) for small, _ in trace.arguments)
    computed = [small for small in known if isinstance(small, Computed)]
    return len(program.stages) == 1 or all(_is_by_place(small, program.dtype) for small in computed)


def _is_by_place(small: Any, dtype: torch.dtype) -> bool:
    """Whether a small value may stand beside each element of its key, and gives the same bits there.

    That is a node's value, or what methods make of such values by operations that round alike at every place.
    """
    if isinstance(small, torch.Tensor):
        return small.dtype is dtype
    if not isinstance(small, Computed):
        return True
    if small.index is not None or not isinstance(small.function, torch._ops.OpOverload):
        return False
    name = small.function.overloadpacket.__name__
    if name == "_to_copy":
        is_alike = small.kwargs == {"dtype": dtype}
    elif name == "select":
        is_alike = small.args[1] == 0
    else:
        is_alike = name in OPERATIONS and not small.kwargs
    return is_alike and all(_is_by_place(operand, dtype) for operand in small.args)


class ComputeTogether(KeyTask):
    """Several small keys, computed side by side."""

    def __init__(self, keys: Sequence[KeyPlan], context: MergeContext) -> None:
        self.keys = keys
        self._structure = keys[0].structure
        self._context = context
        self._begun = False

    def advance(self) -> Sequence[TileTask] | None:
        if self._begun:
            return None
        self._begun = True
        return [self._run]

    def _run(self, scratch: Scratch) -> None:
        if self._is_made_together(scratch):
            for key in self.keys:
                self._context.progress(key.key, key.structure.bytes_read)
            return
        for key in self.keys:
            for task in self._alone(key):
                _run_through(task, scratch)

    def _alone(self, key: KeyPlan) -> Sequence[KeyTask]:
        """The tasks of a key that is not computed with the others."""
        return tasks_of(key, self._context)

    def _is_made_together(self, scratch: Scratch) -> bool:
        """Compute all keys as one; whether all went well."""
        try:
            results = self._compute(scratch)
        except MechaError:
            return False
        self._put(results)
        return True

    def _compute(self, scratch: Scratch) -> Any:
        """The values of all keys for each job; raises MechaError where some are not finite."""
        structure, roots = self._structure, self._roots(scratch)
        results = [roots[output.root] for output in structure.outputs]
        stored = [torch_dtype(info.dtype) for info in structure.stored.values()]
        values = {}
        for output, result, peak in zip(structure.outputs, results, peaks_of(results), strict=True):
            dtype = torch_dtype(output.dtype)
            if not peak < overflows_from(dtype, result.dtype):
                raise _not_finite()
            if loses_digits_below(dtype, stored):
                self._add_peaks(output.job, result)
            if self._context.plan.keeps(output):
                values[output.job] = round_to(result, dtype)
        return values

    def _add_peaks(self, job: int, result: torch.Tensor) -> None:
        """Note the largest magnitude of each key."""
        lengths = torch.tensor([*self._counts.values()])
        peaks = torch.segment_reduce(result.abs(), "max", lengths=lengths).tolist()
        for key, peak in zip(self._counts, peaks, strict=True):
            self._context.stats.add_peak(job, key, peak)

    def _roots(self, scratch: Scratch) -> list[Any]:
        """The values of `run_stacked`."""
        program, leaves = self._structure.program, dict[Node, torch.Tensor]()
        assert program is not None
        for number, model in enumerate(program.models):
            dtype = torch_dtype(self._structure.stored[model].dtype)
            stored = scratch.take("stored", dtype, sum(self._counts.values()))
            self._context.plan.sources[model].read_together([*self._counts], stored.view)
            leaves[model] = scratch.take(("input", number), program.dtype, len(stored.tensor)).tensor
            widen(stored.tensor, leaves[model])
        is_checked = self._context.plan.options.on_nonfinite == "error"
        if is_checked and not all(map(math.isfinite, peaks_of([*leaves.values()]))):
            raise _not_finite()
        return run_stacked(program, self._counts, leaves, self._context.model_values)

    def _put(self, results: Any) -> None:
        """Write what each job has of the keys, one after another."""
        for job, values in results.items():
            self._context.sinks[job].write_together(self._counts, values)

    @cached_property
    def _counts(self) -> dict[str, int]:
        """The elements of each key."""
        return {key.key: key.numel for key in self.keys}


def _not_finite() -> MergeError:
    """The reason to make the keys one by one, which says where, or counts what is lost."""
    return MergeError("a value is not finite")


def _run_through(task: KeyTask, scratch: Scratch) -> None:
    """Do all of a task, stage by stage."""
    while (tiles := task.advance()) is not None:
        for tile in tiles:
            tile(scratch)
            scratch.settle()

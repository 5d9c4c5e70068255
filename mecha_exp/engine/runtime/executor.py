"""Running a plan: each key goes through its stages, tile by tile, by as many workers as there are.

What a tile gives depends on the tile alone, partial results of reductions are combined in the order of their
blocks, and every tile has its place in the output, so the order of the work leaves no trace: the bytes are
the same whatever the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from mecha_exp.engine.compiler.jit import compile_ahead
from mecha_exp.engine.devices import give_back
from mecha_exp.engine.planner.keys.key_plan import KeyPlan
from mecha_exp.engine.planner.plan import Plan
from mecha_exp.engine.residence import Residence
from mecha_exp.engine.runtime.context import MergeContext, MergeStats, Progress
from mecha_exp.engine.runtime.kernels import Kernels
from mecha_exp.engine.runtime.key_tasks import tasks_of
from mecha_exp.engine.runtime.model_values import find_model_values
from mecha_exp.engine.runtime.resumption import Resumption
from mecha_exp.engine.runtime.scheduler import Scheduler
from mecha_exp.engine.runtime.small_keys import small_tasks
from mecha_exp.engine.sinks import Sink
from mecha_exp.engine.spill import Spill


def execute(plan: Plan, sinks: dict[int, Sink], progress: Progress = lambda key, nbytes: None) -> MergeStats:
    """Run a plan into the sinks of its jobs (by index). Commits nothing.

    Raises:
        MergeError: a value that is not finite, a method that failed; the first one, where there are many.
        CheckpointError: reading or writing failed.
    """
    device = plan.options.device
    with Spill() as factors:
        residence = Residence(device)
        context = MergeContext(plan, sinks, MergeStats(), progress, Kernels(plan), factors, residence)
        _execute(context, Resumption(sinks, context.stats, progress))
    give_back(device)
    for source in plan.sources.values():
        source.check_unchanged()
    return context.stats


def _execute(context: MergeContext, resumption: Resumption) -> None:
    """Make the trips and the pass, but for what an interrupted run has finished."""
    plan = context.plan
    if not all(map(resumption.is_finished, plan.keys)):
        find_model_values(context)

    used = [structure for structure in plan.structures if structure.is_used]

    def keys(small: bool) -> Iterator[KeyPlan]:
        wanted = {structure for structure in used if structure.is_small is small}
        return (key for key in plan.keys if key.structure in wanted and not resumption.skips(key))

    large = (task for key in _largest_first(plan, keys(small=False)) for task in tasks_of(key, context))
    _expect(plan, resumption)
    small = small_tasks(keys(small=True), context)
    Scheduler(large, small, plan.options, resumption.finish).run()


def _largest_first(plan: Plan, keys: Iterable[KeyPlan]) -> list[KeyPlan]:
    """Keys by the memory of their whole tensors: the last ones are short, and no worker has a long one alone.

    Those without whole tensors are short as well, and come first, in the order of the files.
    """
    sizes = {key: plan.whole_bytes_of(key) for key in keys}
    return sorted(sizes, key=lambda key: -sizes[key] or -math.inf)


def _expect(plan: Plan, resumption: Resumption) -> None:
    """Tell the inputs which of their keys will be read."""
    keys = _largest_first(plan, plan.keys)
    for model, source in plan.sources.items():
        read = {structure for structure in plan.structures if structure.is_used and structure.reads(model)}
        source.expect(key.key for key in keys if key.structure in read and not resumption.is_finished(key))


def compile_loops(plan: Plan) -> None:
    """Begin to compile what a plan needs, while its outputs are being opened."""
    kernels = Kernels(plan)
    compile_ahead(
        kernel.text
        for structure in dict.fromkeys(key.structure for key in plan.all_keys)
        for stage in (structure.program.stages if structure.program else ())
        for pass_ in stage.passes
        if (kernel := kernels.of(structure, pass_).kernel) is not None
    )

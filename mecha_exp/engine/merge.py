"""The entry of the engine: `merge_many` makes any number of models in as few passes as they need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mecha_exp.architectures.lora import MAKERS_OF_LORAS
from mecha_exp.architectures.lora_header import lora_header
from mecha_exp.checkpoint import is_arithmetic, torch_dtype
from mecha_exp.checkpoint.dtypes import Layout
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.batches import batches
from mecha_exp.engine.planner.checks import clashing_outputs
from mecha_exp.engine.planner.plan import Job, Plan
from mecha_exp.engine.planner.planner import plan
from mecha_exp.engine.provenance import metadata_of
from mecha_exp.engine.report import About, MergeReport, Notice
from mecha_exp.engine.runtime.context import MergeStats, Progress
from mecha_exp.engine.runtime.executor import compile_loops, execute
from mecha_exp.engine.runtime.overflow import saturates
from mecha_exp.engine.runtime.resumption import resume_token
from mecha_exp.engine.scaled_fp8 import error_of
from mecha_exp.engine.sinks import MemorySink, NoSink, ReceiverSink, Sink
from mecha_exp.errors import CheckpointError, ConfigError, Problems, counted, some
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, models_of
from mecha_exp.sources.inputs import open_sources


def merge_many(
    jobs: Sequence[Job | tuple[Node, Any]],
    options: EngineOptions | None = None,
    progress: Progress = lambda key, nbytes: None,
) -> MergeReport:
    """Make every job's model in one pass: shared reads and shared sub-results are done once.

    Jobs over models that differ in their keys or shapes get a pass of their own (see `batches`). The outputs
    of a pass appear one after the other when all of them are complete; after an error before that none does,
    and what lay at their paths is untouched. Where one then cannot be put in its place, the error names it:
    those before it are there and whole, it and those after it are not. After an interrupt (Ctrl-C, a kill)
    what is done lies hidden beside the outputs, and the same merge goes on from there: see
    `MergeReport.resumed_keys`.

    Args:
        jobs: what is to be made; a pair of recipe and output is a job.
        options: for all of them.
        progress: told of each key that is read, and of how many bytes.

    Raises:
        MechaError: see `plan` and `execute`.
    """
    options = options or EngineOptions()
    if options.across is not None:
        raise ConfigError(
            "across: merge_many makes its models in this process. mecha_exp.merge and the command line make "
            "one model by several tasks."
        )
    requests = [job if isinstance(job, Job) else Job(*job) for job in jobs]
    groups = batches([job.recipe for job in requests], options)
    if len(groups) > 1:
        _check_apart(requests, options)
    reports = [_merge([requests[number] for number in group], options, progress) for group in groups]
    return reports[0] if len(reports) == 1 else _joined(groups, reports)


def _merge(jobs: Sequence[Job], options: EngineOptions, progress: Progress) -> MergeReport:
    started = time.perf_counter()
    with plan(jobs, options) as planned:
        return run_plan(planned, progress, started)


def _check_apart(jobs: Sequence[Job], options: EngineOptions) -> None:
    """Check that no pass writes what another one reads or writes."""
    problems = Problems()
    outputs = [job.output for job in jobs if isinstance(job.output, Path)]
    with open_sources(models_of(*(job.recipe for job in jobs)), options.model_dirs) as sources:
        problems.add_all(clashing_outputs(outputs, sources))
    problems.raise_as(CheckpointError)


def _joined(groups: Sequence[Sequence[int]], reports: Sequence[MergeReport]) -> MergeReport:
    """The report of all jobs from those of their passes."""
    place_of = {
        job: (report, index)
        for report, group in zip(reports, groups, strict=True)
        for index, job in enumerate(group)
    }
    places = [place_of[job] for job in sorted(place_of)]
    return MergeReport(
        bytes_read=sum(report.bytes_read for report in reports),
        bytes_written=sum(report.bytes_written for report in reports),
        seconds=sum(report.seconds for report in reports),
        warnings=tuple(dict.fromkeys(warning for report in reports for warning in report.warnings)),
        nonfinite_values=tuple(report.nonfinite_values[index] for report, index in places),
        moments=tuple(report.moments[index] for report, index in places),
        keys=sum(report.keys for report in reports),
        resumed_keys=sum(report.resumed_keys for report in reports),
        quantisation=tuple(report.quantisation[index] for report, index in places),
        choices=tuple(report.choices[index] for report, index in places),
    )


def run_plan(
    planned: Plan,
    progress: Progress = lambda key, nbytes: None,
    started: float | None = None,
    open_sink: Callable[[Plan, int], Sink] | None = None,
) -> MergeReport:
    """Run a plan that is still open, in this process.

    Args:
        started: when its wall time began.
        open_sink: makes the place of a job's tiles; None: as the job says.
    """
    started = time.perf_counter() if started is None else started
    sinks: dict[int, Sink] = {}
    compile_loops(planned)
    try:
        for number in range(len(planned.jobs)):
            sinks[number] = (open_sink or sink_of)(planned, number)
        tally = execute(planned, sinks, progress)
        for sink in sinks.values():
            sink.commit()
    except BaseException as error:
        for sink in sinks.values():
            sink.abort() if isinstance(error, Exception) else sink.suspend()
        raise
    return _report(planned, tally, time.perf_counter() - started)


def sink_of(planned: Plan, number: int) -> Sink:
    """The sink of a job's tiles; a file is resumed where the same merge was interrupted."""
    job, destination = planned.jobs[number], planned.destination(number)
    if destination is not None:
        return destination.open(header_of(planned, number), job.durable, resume_token(planned, number))
    layout = planned.layouts[number]
    if isinstance(job.output, dict):
        return MemorySink(job.output, layout)
    return ReceiverSink(job.output, layout) if callable(job.output) else NoSink()


def header_of(planned: Plan, number: int) -> Mapping[str, str]:
    """The metadata in the header of a job's output: its own, or its provenance; and what a LoRA file says."""
    job = planned.jobs[number]
    metadata = job.metadata
    if metadata is None:
        metadata = metadata_of(job.recipe, planned.options, job.dtype, job.quantize)
    if not isinstance(job.output, Path):
        return metadata
    shapes = {key: shape for key, (_, shape) in planned.layouts[number].items()}
    if not isinstance(job.recipe, MergeNode) or job.recipe.method.choose is None:
        return {**metadata, **lora_header(shapes, job.output.stem)}
    made = ConfigInference.over(planned.sources).of(job.recipe)
    is_extracted = job.recipe.method.identifier in MAKERS_OF_LORAS
    return {**metadata, **lora_header(shapes, job.output.stem, is_extracted, made)}


def _moments(planned: Plan, tally: MergeStats, job: int) -> dict[ModelNode, dict[str, torch.Tensor]]:
    """The moments of a job by input and key."""
    moments = {model: tally.moments[job, model] for model in planned.sources if (job, model) in tally.moments}
    return {model: _in_order(planned, by_key) for model, by_key in moments.items()}


def _in_order(planned: Plan, by_key: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values by key in the order of the plan, so that sums over keys do not hang on who was first."""
    order = {key.key: place for place, key in enumerate(planned.keys)}
    return {key: by_key[key] for key in sorted(by_key, key=order.__getitem__)}


def _or_too_large(layout: Layout) -> str:
    """Values that are too large do not become infinite in every dtype."""
    dtypes = {torch_dtype(name) for name, _ in layout.values() if is_arithmetic(name)}
    cut = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if saturates(dtype))
    return f", or too large for {' and '.join(cut)}" if cut else ""


def _too_small(planned: Plan, tally: MergeStats) -> Iterator[str]:
    """Keys of outputs whose values have fewer digits in the output's dtype than others would, or become 0."""
    keys: dict[str, dict[str, None]] = {}
    for (job, key), peak in sorted(tally.peaks.items()):
        name, _ = planned.layouts[job][key]
        if 0 < peak < torch.finfo(torch_dtype(name)).tiny:
            keys.setdefault(name, {})[key] = None
    for name, small in keys.items():
        dtype = torch_dtype(name)
        word, limits = str(dtype).removeprefix("torch."), torch.finfo(dtype)
        yield (
            f"{counted(len(small), 'key of the output has', 'keys of the output have')} only values below "
            f"{limits.tiny:.2g}, where {word} keeps fewer digits, and none "
            f"below {limits.smallest_normal * limits.eps / 2:.2g}: {some(small, 3)}. "
            f"bfloat16 and float32 keep them{', and so does fp8_scaled' if dtype.itemsize == 1 else ''}."
        )


def _report(planned: Plan, tally: MergeStats, seconds: float) -> MergeReport:
    warnings = list(planned.warnings)
    if tally.disagreeing:
        kept = sorted(tally.disagreeing)
        keys = counted(
            len(kept), "key is not floating point and differs", "keys are not floating point and differ"
        )
        text = f"{keys} between the inputs; the first one's values are kept: {some(kept)}"
        warnings.append(Notice(text))
    nonfinite = [0] * len(planned.jobs)
    for (job, _), count in tally.nonfinite.items():
        nonfinite[job] += count
    for number, (merged, count) in enumerate(zip(planned.jobs, nonfinite, strict=True)):
        if count:
            where = f" {merged.output}" if isinstance(merged.output, Path) else ""
            values = counted(count, f"value of the output{where} is", f"values of the output{where} are")
            text = f"{values} not finite{_or_too_large(planned.layouts[number])}"
            warnings.append(Notice(text, About.NONFINITE_OUTPUT))
    warnings += map(Notice, _too_small(planned, tally))
    jobs = range(len(planned.jobs))
    trips = 0 if tally.found_model_values else planned.bytes_of_trips
    return MergeReport(
        bytes_read=planned.bytes_read - trips - sum(key.structure.bytes_read for key in tally.resumed),
        bytes_written=planned.bytes_written - sum(planned.bytes_written_of(key) for key in tally.resumed),
        seconds=seconds,
        warnings=tuple(warnings),
        nonfinite_values=tuple(nonfinite),
        moments=tuple(_moments(planned, tally, job) for job in jobs),
        keys=len(planned.keys),
        resumed_keys=len(tally.resumed),
        quantisation=tuple(error_of(_in_order(planned, tally.errors.get(job, {}))) for job in jobs),
        choices=tuple(map(planned.choices, jobs)),
    )

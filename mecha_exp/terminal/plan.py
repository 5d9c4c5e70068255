"""The plan of a merge, before it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from mecha_exp.checkpoint import dtype_name
from mecha_exp.engine import Plan
from mecha_exp.engine.ir.program import Program
from mecha_exp.errors import counted
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal.console import PathCell, as_typed, make_table, print_table, stdout


def show_plan(
    planned: Plan,
    names: Sequence[str],
    hyperparameters: dict[str, Any],
    how_to_merge: str = "Leave out debug=plan to do it.",
) -> None:
    """Print what a merge would do: inputs, hyperparameters, work, outputs, bytes, memory, warnings."""
    settings = make_table("hyperparameter", "value")
    for name, value in hyperparameters.items():
        settings.add_row(name, str(value))
    ways = make_table("elements", "each pass over them is run")
    for way, elements in planned.fused.items():
        ways.add_row(f"{elements:,}", way)
    print_table(_input_table(planned, names))
    for table in (settings, *_value_tables(planned), _work_table(planned), ways):
        stdout.print(table)
    for job, layout in zip(planned.jobs, planned.layouts, strict=True):
        target = "kept in memory" if isinstance(job.output, dict) else str(job.output)
        dtypes = ", ".join(f"{count} {d}" for d, count in Counter(d for d, _ in layout.values()).items())
        stdout.print(f" output   {counted(len(layout), 'key')} ({dtypes}): {escape(target)}", soft_wrap=True)
        if choices := planned.choices(planned.jobs.index(job)):
            stdout.print(f" keys     {', '.join(f'{count} {name}' for name, count in choices.items())}")
    stdout.print(f" reads    {human_bytes(planned.bytes_read)}")
    for trip in planned.trips:
        names = ", ".join(dict.fromkeys(value.method.identifier for value in trip.values))
        keys = counted(len(trip.keys), "key")
        words = f" before   one more trip over {keys}, for the numbers of the whole model: {names}"
        stdout.print(words, soft_wrap=True)
    stdout.print(f" writes   {human_bytes(planned.bytes_written)}")
    arithmetic = ", ".join(f"{counted(n, 'key')} in {dtype_name(d)}" for d, n in planned.arithmetic.items())
    stdout.print(f" computes {arithmetic or 'nothing'}")
    stdout.print(
        f" memory   about {human_bytes(planned.memory)} of buffers for "
        f"{counted(planned.options.threads, 'worker')}"
    )
    for warning in planned.warnings:
        stdout.print(f" warning  {escape(as_typed(warning))}", soft_wrap=True)
    stdout.print(f" Nothing was merged. {how_to_merge}", markup=False)


def _input_table(planned: Plan, names: Sequence[str]) -> Table:
    table = make_table("input", "keys", "bytes", "file")
    for name, source in zip(names, planned.inputs.values(), strict=True):
        infos = source.infos()
        size = sum(info.nbytes for info in infos.values())
        table.add_row(name, str(len(infos)), human_bytes(size), PathCell(source.name))
    return table


def _work_table(planned: Plan) -> Table:
    """The keys by how much work they need."""
    table = make_table("keys", "stages", "passes over the data", "whole tensors, at most")
    amounts = {program: _amount_of_work(program) for program in {key.program for key in planned.keys}}
    whole_bytes: dict[tuple[int, int], list[int]] = {}
    for key in planned.keys:
        whole_bytes.setdefault(amounts[key.program], []).append(planned.whole_bytes_of(key))
    for (stages, passes), sizes in whole_bytes.items():
        largest = human_bytes(max(sizes)) if any(sizes) else "-"
        table.add_row(str(len(sizes)), str(stages), str(passes), largest)
    return table


def _value_tables(planned: Plan) -> Iterator[Table]:
    """A table of values by block for every hyperparameter that has several values."""
    for name, values in planned.effective_values().items():
        table = make_table("block", name, "keys", "component")
        for value in values:
            numbers = " ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value.values)
            table.add_row(value.block, numbers, str(value.keys), value.component)
        yield table


def _amount_of_work(program: Program | None) -> tuple[int, int]:
    """The number of stages and of passes over the data; a copied key takes one pass."""
    return (len(program.stages), sum(len(stage.passes) for stage in program.stages)) if program else (0, 1)

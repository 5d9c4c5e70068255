"""`python -m mecha_exp merge`: merge a recipe file, or the recipe in a merged model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.cli.arguments import add_engine, add_recipe, make_parser
from mecha_exp.errors import ConfigError, counted
from mecha_exp.system.memory import PeakMemory
from mecha_exp.system.progress import merge_summary
from mecha_exp.terminal.console import as_typed, print_line

if TYPE_CHECKING:
    from mecha_exp.engine import EngineOptions, Job
    from mecha_exp.recipe.foreign import ForeignRecipe, RecipeReader

EXAMPLE = """\
examples:
    python -m mecha_exp merge recipe.mecha -o merged.safetensors
    python -m mecha_exp merge template.mecha -p a a.safetensors -p alpha 0.3 --models-dir ~/models
    python -m mecha_exp merge merged.safetensors -o again.safetensors     the same bytes again
    python -m mecha_exp merge mergekit.yml OUTPUT                         as mergekit-yaml
    python -m mecha_exp merge recipe.mecha engine.across=4 engine.cluster=ray --shard-size 5GB -o merged

A merge that is interrupted is taken up by the same command. For sweeps, measuring and tracking use a
configuration: python -m mecha_exp recipe=mecha recipe.path=template.mecha a=a.safetensors alpha=0.3,0.5 -m
"""


def main(arguments: list[str]) -> int:
    """Merge a recipe into a file."""
    options, unknown = _parser().parse_known_intermixed_args(arguments)
    from mecha_exp.across import run_plan
    from mecha_exp.checkpoint.remote import with_slashes
    from mecha_exp.cli.recipes import engine_options, load_foreign, load_recipe
    from mecha_exp.engine import plan
    from mecha_exp.recipe.foreign import ForeignRecipe, reader_of_file
    from mecha_exp.terminal.bars import progress_bar

    reader = reader_of_file(options.recipe)
    _require_known(unknown, reader)
    if reader:
        options.output = _output_of_foreign(options)
    merge = load_foreign(options, reader) if reader else ForeignRecipe(load_recipe(options))
    previous = _PreviousMerge() if reader else _previous_merge(options)
    engine = engine_options(options, **previous.engine, workers=options.workers)
    job = _job(options, merge, previous, engine)
    with PeakMemory() as memory, plan([job], engine) as planned, progress_bar(planned) as advance:
        report = run_plan(planned, advance, options.plugin)
    for note in merge.notes:
        print_line(f"warning: {note}")
    for warning in report.warnings:
        print_line(f"warning: {as_typed(warning)}")
    if engine.task is None:
        print_line(with_slashes(str(job.output)))
    else:
        print_line(
            f"task {engine.task} of {engine.across} is done. When all are, the same command without "
            "engine.task puts the model in its place.",
        )
    summary = merge_summary(report.seconds, report.bytes_read, report.bytes_written, memory.peak)
    print_line(f"merged {counted(report.keys, 'key')} in {summary}")
    return 0


def _size(text: str) -> int:
    from mecha_exp.checkpoint import parse_size

    return parse_size(text)


def _job(
    options: argparse.Namespace, merge: ForeignRecipe, previous: _PreviousMerge, engine: EngineOptions
) -> Job:
    """The job of a command; a model that is merged again unchanged gets the same header."""
    from mecha_exp.cards import Settings, card_of
    from mecha_exp.checkpoint import is_file_name
    from mecha_exp.engine import Job
    from mecha_exp.engine.planner.by_key import parse_output_dtype

    dtype = parse_output_dtype(options.dtype or previous.output.get("dtype"))
    output = _output(options)
    is_unchanged = previous.metadata and not options.parameter and not options.dtype
    has_card = options.card and not is_file_name(output)
    return Job(
        merge.recipe,
        output,
        dtype,
        previous.metadata if is_unchanged else None,
        shard_size=options.shard_size,
        quantize=previous.output.get("quantize"),
        small_files=merge.small_files,
        card=card_of(merge.recipe, lambda: Settings(engine, dtype, merge.config)) if has_card else None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "merge",
        "Merge models as a recipe file says.",
        EXAMPLE,
    )
    add_recipe(parser)
    add_engine(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="the merged model: a .safetensors file, or else a folder like that of the first model (default: "
        "the recipe's name with .safetensors, in the current folder)",
    )
    parser.add_argument("--dtype", help="of the output, as float16 (default: each key's in the first model)")
    parser.add_argument(
        "--shard-size",
        type=_size,
        metavar="SIZE",
        help="the most bytes of a file of a folder, as 5GB (default: one file)",
    )
    parser.add_argument(
        "--no-card",
        dest="card",
        action="store_false",
        help="write no model card (README.md) into a folder, for which the inputs are read once more",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="threads (default: one for each core); never changes a byte"
    )
    return parser


def _require_known(unknown: Sequence[str], reader: RecipeReader | None) -> None:
    """Check that no option is unknown; those of the tool's command are errors with what takes their place."""
    if not unknown:
        return
    names = [word.partition("=")[0] for word in unknown]
    known = reader.options if reader else {}
    meant = [f"{name}: {known[name]}" for name in names if name in known]
    if reader and meant:
        raise ConfigError(f"these are options of {reader.command}. In their place: {', '.join(meant)}.")
    _parser().error(f"unrecognized arguments: {' '.join(unknown)}")


@dataclass(frozen=True)
class _PreviousMerge:
    """The metadata and settings in the header of a merged model, with which it is merged again."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    output: Mapping[str, Any] = field(default_factory=dict)


def _previous_merge(options: argparse.Namespace) -> _PreviousMerge:
    from mecha_exp.checkpoint import open_stored
    from mecha_exp.engine.provenance import Origin
    from mecha_exp.recipe.files import SUFFIX as RECIPE_SUFFIX
    from mecha_exp.recipe.files import find_recipe

    path = find_recipe(options.recipe, options.models_dir)
    if path.suffix == RECIPE_SUFFIX:
        return _PreviousMerge()
    with open_stored(path) as model:
        metadata = model.metadata
    origin = Origin.of_file(path)
    if origin is None:
        return _PreviousMerge(metadata)
    engine = {name: value for name, value in origin.engine.items() if value is not None}
    return _PreviousMerge(metadata, engine, origin.output)


def _output_of_foreign(options: argparse.Namespace) -> Path:
    """The output of a recipe in the form of another tool: the word after it, as for mergekit-yaml."""
    words = [word for word in options.setting if "=" not in word]
    if words and options.output is None:
        options.setting.remove(words[0])
        return Path(words[0])
    if options.output is None:
        raise ConfigError(f"say where the model goes: python -m mecha_exp merge {options.recipe} OUTPUT")
    return Path(options.output)


def _output(options: argparse.Namespace) -> Path:
    """The path of the output; an existing file is replaced only if `--output` names it."""
    if options.output is not None:
        return Path(options.output)
    target = Path(f"{options.recipe.stem}.safetensors")
    if target.exists():
        raise ConfigError(f"{target} is there already. Say with -o where the model goes.")
    return target

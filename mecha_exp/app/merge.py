"""`python -m mecha_exp merge`: a recipe file, or the recipe in a merged model, made into a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from mecha_exp.app.display import human_bytes, out, progress_bar
from mecha_exp.app.recipes import add_recipe, load_recipe
from mecha_exp.checkpoint import parse_dtype
from mecha_exp.engine import EngineOptions, Job, plan, run_plan
from mecha_exp.engine.merging import recipe_metadata
from mecha_exp.errors import ConfigError

EXAMPLE = """\
examples:
    python -m mecha_exp merge recipe.mecha -o merged.safetensors
    python -m mecha_exp merge template.mecha -p a a.safetensors -p alpha 0.3 --models-dir ~/models
    python -m mecha_exp merge merged.safetensors -o again.safetensors     the same bytes again

A merge that is interrupted is taken up by the same command. For sweeps, measuring and tracking use a
configuration: python -m mecha_exp recipe=mecha recipe.path=template.mecha a=a.safetensors alpha=0.3,0.5 -m
"""


def main(arguments: list[str]) -> int:
    """Merge a recipe into a file."""
    parser = argparse.ArgumentParser(
        prog="python -m mecha_exp merge",
        description="Merge models as a recipe file says.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(parser)
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
        "--workers", type=int, metavar="N", help="threads (default: one for each core); never changes a byte"
    )
    options = parser.parse_args(arguments)
    recipe = load_recipe(options)
    job = Job(
        recipe,
        _output(options),
        parse_dtype(options.dtype) if options.dtype else None,
        recipe_metadata(recipe),
    )
    engine = EngineOptions(workers=options.workers, model_dirs=options.models_dir)
    with plan([job], engine) as planned, progress_bar(planned) as advance:
        report = run_plan(planned, advance)
    for warning in report.warnings:
        out.print(f"warning: {warning}", markup=False, soft_wrap=True)
    out.print(str(job.output), markup=False, soft_wrap=True)
    out.print(
        f"merged {report.keys} keys in {report.seconds:.2f} s: {human_bytes(report.bytes_read)} read, "
        f"{human_bytes(report.bytes_written)} written"
    )
    return 0


def _output(options: argparse.Namespace) -> Path:
    """Where the model goes; a file that is there already is replaced only if it was named."""
    if options.output is not None:
        return Path(options.output)
    target = Path(f"{options.recipe.stem}.safetensors")
    if target.exists():
        raise ConfigError(f"{target} is there already. Say with -o where the model goes.")
    return target

"""`python -m mecha_exp adapters`: merge adapters of PEFT into one adapter, or extract one from a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.cli.arguments import add_models_dir, make_parser
from mecha_exp.errors import counted, some
from mecha_exp.terminal.console import make_table, print_line, print_table, stdout

if TYPE_CHECKING:
    from mecha_exp.peft.extraction import ExtractedAdapter
    from mecha_exp.peft.merge import MergedAdapter

EXAMPLE = """\
examples:
    python -m mecha_exp adapters math code -o both           concatenated: no error, ranks add up
    python -m mecha_exp adapters math code --weights 1 -0.3 -o both --rank 16
    python -m mecha_exp adapters extract FINE BASE OUTPUT --rank 16      from a model: see its --help
"""

EXTRACT = "extract"
EXAMPLE_OF_EXTRACT = """\
examples:
    python -m mecha_exp adapters extract fine-tuned base adapter --rank 16
    python -m mecha_exp adapters extract fine-tuned base adapter --modules-to-save embed_tokens norm
    python -m mecha_exp adapters extract fine-tuned base adapter --leave-out '*.bias' '*norm.weight'
"""

SHOWN_MODULES = 3
"""How many modules with the largest errors are named."""


def main(arguments: list[str]) -> int:
    """Merge adapters, or extract one, and say what the rank costs."""
    if arguments[:1] == [EXTRACT]:
        return _extract(arguments[1:])
    options = _parser().parse_args(arguments)
    from mecha_exp.peft.merge import merge_adapters

    weights = options.weights if len(options.weights) != 1 else options.weights[0]
    merged = merge_adapters(
        options.adapters, options.output, weights, options.rank, model_dirs=options.models_dir
    )
    _show(merged, options.rank)
    return 0


def _extract(arguments: list[str]) -> int:
    from mecha_exp.peft.extraction import extract_adapter

    options = _parser_of_extract().parse_args(arguments)
    adapter = extract_adapter(
        options.fine,
        options.base,
        options.output,
        options.rank,
        modules_to_save=options.modules_to_save,
        leave_out=options.leave_out,
        model_dirs=options.models_dir,
    )
    more = f", {counted(len(adapter.whole), 'tensor')} whole" if adapter.whole else ""
    print_line(f"{_summary(adapter)}{more}, relative error {adapter.error:.3g}")
    if adapter.left_out:
        print_line(f"left out: {some(adapter.left_out, 5)}")
    table = make_table("module", "rank", "relative error")
    for module, error in adapter.errors.items():
        table.add_row(module, str(adapter.ranks[module]), f"{error:.3g}")
    print_table(table)
    return 0


def _summary(adapter: ExtractedAdapter | MergedAdapter) -> str:
    """Where an adapter lies, its modules and their ranks: `both: 4 modules of rank 2 to 16`."""
    least, most = min(adapter.ranks.values()), max(adapter.ranks.values())
    ranks = f"{least}" if least == most else f"{least} to {most}"
    return f"{adapter.path}: {len(adapter.ranks)} modules of rank {ranks}"


def _parser_of_extract() -> argparse.ArgumentParser:
    parser = make_parser(
        f"adapters {EXTRACT}",
        "Extract an adapter of PEFT from a fine-tuned model: at each linear layer the product of a rank that "
        "is nearest to what it adds to its base, with the error of each.",
        EXAMPLE_OF_EXTRACT,
    )
    parser.add_argument("fine", help="the fine-tuned model: a file, a folder, or a name on the hub")
    parser.add_argument("base", help="the model that it was trained from")
    parser.add_argument("output", type=Path, metavar="FOLDER", help="the adapter")
    parser.add_argument(
        "--rank", type=int, default=16, metavar="R", help="the largest of a module (default: 16)"
    )
    parser.add_argument(
        "--modules-to-save",
        nargs="+",
        default=[],
        metavar="NAME",
        help="ends of names of modules saved whole",
    )
    parser.add_argument(
        "--leave-out", nargs="+", default=[], metavar="PATTERN", help="of keys whose changes are left out"
    )
    add_models_dir(parser, "where the models are looked for, after the current folder; may be repeated")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "adapters",
        "Merge adapters of PEFT into one: the weighted sum of what they add to their base. Without a rank "
        "their factors are concatenated, which costs no error.",
        EXAMPLE,
    )
    parser.add_argument("adapters", nargs="+", metavar="ADAPTER", help="a folder with adapter_config.json")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FOLDER", help="the merged adapter"
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        type=float,
        default=[1.0],
        metavar="W",
        help="one for all, or one for each adapter, of either sign (default: 1)",
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="of each module; the error that it costs is shown"
    )
    add_models_dir(parser, "where the adapters are looked for, after the current folder; may be repeated")
    return parser


def _show(merged: MergedAdapter, rank: int | None) -> None:
    print_line(f"{_summary(merged)}, relative error {merged.error:.3g}")
    if len(merged.bases) > 1:
        print_line(
            f"warning: the adapters name different bases: {', '.join(merged.bases)}. Are these one model?"
        )
    if rank is not None and merged.error:
        worst = sorted(merged.errors, key=lambda name: -merged.errors[name])[:SHOWN_MODULES]
        listed = ", ".join(f"{name} {merged.errors[name]:.3g}" for name in worst)
        print_line(f"the largest: {listed}")
    if merged.error_at:
        table = make_table("rank", "relative error")
        for other, error in merged.error_at.items():
            table.add_row(str(other), f"{error:.3g}")
        stdout.print(table)

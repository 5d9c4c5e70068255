"""`python -m mecha_exp figures`: the figures of a sweep as vectors, at the width of a paper's column."""

from __future__ import annotations

import argparse
from pathlib import Path

from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import ConfigError
from mecha_exp.paths import OUTPUTS
from mecha_exp.report.conclusion import concluded_results
from mecha_exp.report.figures import draw_figures
from mecha_exp.report.figures.paper import FORMATS, Look
from mecha_exp.runs.query import find_sweep
from mecha_exp.terminal.console import print_line

COLUMN, LETTERS = 3.25, 9.0
"""The width of a column in inches, and the size of letters in points, of two-column conferences."""
EXAMPLE = """\
examples:
    python -m mecha_exp figures                                    of the newest sweep, as PDF
    python -m mecha_exp figures alpha_by_k --width 5.5 --font-size 10    for a page of one column
    python -m mecha_exp figures --format svg --output paper/figures

A figure has no title: the caption of the text says what it shows. Print the captions with the files.
"""


def main(arguments: list[str]) -> int:
    """Write a sweep's figures for a paper."""
    options = _parser().parse_args(arguments)
    if not 1 <= options.width <= 40 or not 4 <= options.font_size <= 40:
        raise ConfigError(
            f"--width {options.width:g} --font-size {options.font_size:g}: expected a width of 1 to 40 "
            "inches, and letters of 4 to 40 points."
        )
    folder, sweep = find_sweep(options.sweep, [options.folder])
    output = options.output or folder / "figures"
    output.mkdir(parents=True, exist_ok=True)
    look = Look(options.format, options.width, options.font_size)
    pictures = draw_figures(concluded_results(sweep, folder), folder, output=output, look=look)
    if not pictures:
        raise ConfigError(f"{folder} has no figures: no point has a metric, or no key was swept.")
    for picture in pictures:
        print_line(f"{picture.path}: {picture.caption}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "figures",
        "Write the figures of a sweep for a paper: vectors, as wide as a column, in letters of the text's "
        "size, without titles.",
        EXAMPLE,
    )
    parser.add_argument("sweep", nargs="?", help="its folder or its title (default: the newest)")
    parser.add_argument("--in", dest="folder", type=Path, default=OUTPUTS, help="where sweeps are looked for")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="(default: %(default)s)")
    parser.add_argument(
        "--width", type=float, default=COLUMN, metavar="INCHES", help="of the column (default: %(default)s)"
    )
    parser.add_argument(
        "--font-size",
        type=float,
        default=LETTERS,
        metavar="POINTS",
        help="of the text (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="(default: figures in the sweep's folder)")
    return parser

"""`python -m mecha_exp bundle`: a sweep as one archive, from which a reviewer makes it again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import ConfigError
from mecha_exp.paths import OUTPUTS
from mecha_exp.runs.query import find_sweep
from mecha_exp.terminal.console import print_line

EXAMPLE = """\
examples:
    python -m mecha_exp bundle                            the newest sweep, as TITLE.zip
    python -m mecha_exp bundle alpha_by_k --output supplement.zip
    python -m mecha_exp reproduce supplement.zip --models-dir ~/models

It has configurations, recipes, records, outcomes, plugins, checksums and BibTeX, and no models. Records name
paths and the machine: read `bundle.json` and a `run.json` before you send it to an anonymous review.
"""


def main(arguments: list[str]) -> int:
    """Write a sweep's archive."""
    parser = make_parser(
        "bundle", "Write a sweep into one archive, from which it can be made again elsewhere.", EXAMPLE
    )
    parser.add_argument("sweep", nargs="?", help="its folder or its title (default: the newest)")
    parser.add_argument("--in", dest="folder", type=Path, default=OUTPUTS, help="where sweeps are looked for")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a .zip file (default: the title)")
    options = parser.parse_args(arguments)
    from mecha_exp.runs.bundle import write_bundle

    folder, sweep = find_sweep(options.sweep, [options.folder])
    target = options.output or Path(re.sub(r"[^\w.-]+", "_", sweep.title).strip("_.") + ".zip")
    if target.suffix != ".zip":
        raise ConfigError(f"--output {target}: expected a .zip file.")
    size = write_bundle(sweep, folder, target)
    print_line(f"{target}: {size['files']:,} files, {size['bytes']:,} bytes before compression")
    print_line(
        f"make it again with: python -m mecha_exp reproduce {shlex.quote(str(target))} --models-dir FOLDER"
    )
    return 0

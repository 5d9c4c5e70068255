"""`python -m mecha_exp cite`: the BibTeX entries of the methods that a sweep used."""

from __future__ import annotations

import sys
from pathlib import Path

from mecha_exp.cli.arguments import add_plugins, make_parser
from mecha_exp.errors import ConfigError, RecipeError
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.paths import OUTPUTS
from mecha_exp.runs.query import find_run, find_sweep
from mecha_exp.runs.record import read_recipe

EXAMPLE = """\
examples:
    python -m mecha_exp cite > references.bib             of the newest sweep
    python -m mecha_exp cite ties_by_alpha                of a sweep, by its folder or its title
    python -m mecha_exp cite ties dare_ties               of merge methods
"""


def main(arguments: list[str]) -> int:
    """Print BibTeX entries."""
    parser = make_parser(
        "cite",
        "Print the BibTeX entries of the papers and projects whose merge methods a sweep used, and that of "
        "mecha_exp.",
        EXAMPLE,
    )
    parser.add_argument(
        "what", nargs="*", help="sweeps, runs or merge methods, by their names (default: the newest sweep)"
    )
    parser.add_argument("--in", dest="folder", type=Path, default=OUTPUTS, help="where sweeps are looked for")
    add_plugins(parser)
    options = parser.parse_args(arguments)
    from mecha_exp.plugins import load_plugins
    from mecha_exp.runs.citations import cited

    load_plugins(options.plugin)
    methods: list[str] = []
    modes: list[str] = []
    for word in options.what or [None]:
        _add(word, [options.folder], methods, modes)
    found, without = cited(dict.fromkeys(methods), modes)
    sys.stdout.write("\n".join(entry.text for entry in found))
    if without:
        sys.stdout.write(f"\n% no paper is known of: {', '.join(without)}\n")  # BibTeX reads over it
    return 0


def _add(word: str | None, folders: list[Path], methods: list[str], modes: list[str]) -> None:
    """Add the methods that a word means, and the mode of a sweep.

    Raises:
        ConfigError: it means nothing here.
    """
    from mecha_exp.runs.citations import methods_in

    if word is not None:
        try:
            methods.append(resolve_method(word).identifier)
            return
        except RecipeError as error:
            unknown = str(error)
    try:
        folder, sweep = find_sweep(word, folders)
    except ConfigError:
        if word is None:
            raise
        methods += methods_in(_run(word, folders, unknown))
        return
    modes.append(sweep.mode)
    for path in sweep.records(folder):
        methods += methods_in(read_recipe(path))


def _run(word: str, folders: list[Path], unknown: str) -> str:
    """The recipe of a run."""
    try:
        return find_run(word, folders).recipe
    except ConfigError:
        raise ConfigError(f"'{word}' is not a merge method, a sweep or a run here: {unknown}") from None

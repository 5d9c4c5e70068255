"""`python -m mecha_exp recalibrate`: find the running statistics of a merged model's batch norms anew."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mecha_exp.cli.arguments import add_models_dir, make_parser, read_words
from mecha_exp.errors import ConfigError, counted
from mecha_exp.terminal.console import print_line

EXAMPLE = """\
settings, as name=value:
    data      what the module takes
    module    FILE.py:function, a function of (state_dict, data) to a Subject
    output    a .safetensors file
    count     examples at most (default: all)

example:
    python -m mecha_exp recalibrate merged.safetensors module=net.py:subject data=x.pt output=new.safetensors
"""

_SETTINGS: dict[str, Callable[[str], Any]] = {"data": str, "module": str, "output": Path, "count": int}


def main(arguments: list[str]) -> int:
    """Run the data through the model, and write the model with its new running statistics."""
    options = _parser().parse_args(arguments)
    from mecha_exp.checkpoint import open_stored
    from mecha_exp.lab.content_hash import content_of
    from mecha_exp.sources.search import find_model
    from mecha_exp.terminal.bars import examples_bar

    values = read_words(options.setting, _SETTINGS, "recalibrate")
    if "module" not in values:
        raise ConfigError("module=... is missing: FILE.py:function, which makes the network of the model.")
    from mecha_exp.calibration import load_subject, recalibrate
    from mecha_exp.calibration.loader import hash_of_code, hash_of_data
    from mecha_exp.calibration.measurement import check_output

    check_output(values["output"], [Path(values["data"])])
    path = find_model(options.model, options.models_dir)
    provenance = {
        "model": str(options.model),
        "model_sha256": content_of(path),
        "data": values["data"],
        "data_sha256": hash_of_data(values["data"]),
        "module": values["module"],
        "code": hash_of_code(values["module"]),
    }
    with open_stored(path) as stored:
        subject = load_subject(stored, values["data"], values["module"], values.get("count"))
        examples = len(subject.examples)
        provenance |= {"count": examples}
        with examples_bar("recalibrating", examples) as advance:
            names = recalibrate(subject, stored, values["output"], provenance, advance)
    norms = counted(len(names), "batch norm has", "batch norms have")
    print_line(f"{values['output']}: {norms} the statistics of {counted(examples, 'example')}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "recalibrate",
        "Run data through a merged model, and write it with the running means and variances that its batch "
        "norms have on them: a merge of the inputs' statistics is not that (REPAIR, arXiv:2211.08403).",
        EXAMPLE,
    )
    parser.add_argument("model", help="a file or a folder")
    parser.add_argument("setting", nargs="*", default=[], metavar="NAME=VALUE", help="see below")
    add_models_dir(parser, "where the model is looked for, after the current folder; may be repeated")
    return parser

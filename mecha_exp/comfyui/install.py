"""`python -m mecha_exp comfyui install`: let a ComfyUI find the nodes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import ConfigError
from mecha_exp.system.atomic_write import atomic_write_text
from mecha_exp.terminal.console import print_line

NAME = "mecha_exp_nodes"
"""The folder among the custom nodes; another name than the package, which it would hide."""

_TEXT = '''"""Nodes of mecha_exp; written by `python -m mecha_exp comfyui install`."""

from mecha_exp.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
'''

EXAMPLE = "example: python -m mecha_exp comfyui install ~/ComfyUI/custom_nodes"


def main(arguments: list[str]) -> int:
    """Write the folder that ComfyUI loads; writing it again changes nothing."""
    options = _parser().parse_args(arguments)
    folder = _custom_nodes(options.folder)
    try:
        (folder / NAME).mkdir(exist_ok=True)
        atomic_write_text(folder / NAME / "__init__.py", _TEXT)
    except OSError as error:
        raise ConfigError(f"{folder / NAME} cannot be written: {error.strerror}.") from None
    print_line(f"{folder / NAME}: start ComfyUI again to load it")
    print_line(
        f"mecha_exp is installed for {sys.executable}. Install it for the Python of ComfyUI too, if that is "
        "another one.",
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "comfyui", "Write the folder through which ComfyUI finds the nodes of mecha_exp.", EXAMPLE
    )
    parser.add_argument("action", choices=["install"], help="what is done")
    parser.add_argument("folder", type=Path, help="the folder of ComfyUI, or its custom_nodes")
    return parser


def _custom_nodes(folder: Path) -> Path:
    for candidate in (folder / "custom_nodes", folder):
        if candidate.absolute().name == "custom_nodes" and candidate.is_dir():
            return candidate
    raise ConfigError(
        f"{folder} is not a folder of ComfyUI: there is no custom_nodes in it. Name that folder."
    )

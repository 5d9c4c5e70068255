"""`python -m mecha_exp push`: upload a merged folder to a hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import counted
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal.console import make_table, print_line, print_table

if TYPE_CHECKING:
    from mecha_exp.publishing.push import Upload

EXAMPLE = """\
examples:
    python -m mecha_exp push merged me/merged              what would be uploaded, without the network
    python -m mecha_exp push merged me/merged --yes        upload it
    python -m mecha_exp push merged me/merged --public --yes

Hub and token are those of huggingface_hub: `hf auth login`, or the variables HF_ENDPOINT and HF_TOKEN.
"""


def main(arguments: list[str]) -> int:
    """Show an upload, and do it if that is asked for."""
    options = _parser().parse_args(arguments)
    from mecha_exp.publishing.push import Upload

    upload = Upload.of(
        options.folder, options.repository, options.message, options.revision, not options.public
    )
    if not options.yes:
        _show(upload)
        return 0
    address = upload.send()
    print_line(f"{counted(len(upload.files), 'file')}, {human_bytes(upload.nbytes)}: {address}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "push",
        "Upload a merged folder to the Hugging Face hub in one commit. Without --yes it only says what would "
        "be uploaded. The folder has a model card and a complete model, or is refused.",
        EXAMPLE,
    )
    parser.add_argument("folder", type=Path, help="of a merged model")
    parser.add_argument("repository", metavar="ORG/NAME", help="on the hub; made if it does not exist")
    parser.add_argument("--yes", action="store_true", help="upload")
    parser.add_argument(
        "--public", action="store_true", help="a new repository is for all to see (default: private)"
    )
    parser.add_argument("-m", "--message", help="of the commit (default: the title of the card)")
    parser.add_argument("--revision", metavar="BRANCH", help="another branch, which exists")
    return parser


def _show(upload: Upload) -> None:
    table = make_table("file", "size")
    for name, nbytes in upload.files.items():
        table.add_row(name, human_bytes(nbytes))
    print_table(table)
    kind = "private" if upload.is_private else "public"
    branch = f", branch {upload.revision}" if upload.revision else ""
    lines = (
        f"to {upload.repository}{branch} ({kind}, if it is new): {counted(len(upload.files), 'file')}, "
        f"{human_bytes(upload.nbytes)}",
        f"commit: {upload.message}",
        "Nothing was uploaded. The same command with --yes uploads it.",
    )
    for line in lines:
        print_line(line)

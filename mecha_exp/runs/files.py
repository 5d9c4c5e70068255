"""Files that evaluators gave beside their numbers, such as pictures.

RUN/files/NAME                     of a point, by its main evaluator
RUN/files/test/NAME                of another split; NAME/... of another evaluator
SWEEP/files/inputs/INPUT/NAME      of an input; in the run's folder where there is no sweep
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mecha_exp.system.atomic_write import atomic_write
from mecha_exp.system.folders import files_below
from mecha_exp.system.texts import file_name

FILES = "files"
INPUTS = "inputs"


def write_files(contents: Mapping[str, bytes | Path], folder: Path) -> None:
    """Write files into a folder by their relative names; those of an earlier run are removed first.

    Args:
        contents: bytes, or files of the store, which are linked where the file system can.
        folder: for these files alone; without contents it does not exist afterwards.
    """
    shutil.rmtree(folder, ignore_errors=True)
    add_files(contents, folder)


def add_files(contents: Mapping[str, bytes | Path], folder: Path) -> None:
    """Write files into a folder beside those that are there; files of the same names are replaced."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            if isinstance(content, bytes):
                temporary.write_bytes(content)
                continue
            with suppress(OSError):
                temporary.hardlink_to(content)
            if not temporary.exists():
                shutil.copyfile(content, temporary)


def add_files_of_input(contents: Mapping[str, bytes | Path], name: str, folder: Path) -> None:
    """Write the files of an input into the folder of its run or sweep."""
    add_files(contents, folder / FILES / INPUTS / file_name(name))


def files_of_run(folder: Path) -> dict[str, Path]:
    """The files of a point by their relative names, in order."""
    return _below(folder / FILES, leave_out=INPUTS)


def files_of_inputs(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of each input of a run or sweep, by the input's name and theirs."""
    parents = sorted(path for path in (folder / FILES / INPUTS).glob("*") if path.is_dir())
    return {parent.name: _below(parent) for parent in parents}


def _below(folder: Path, leave_out: str = "") -> dict[str, Path]:
    named = files_below(folder).items()
    return {name: path for name, path in named if not leave_out or Path(name).parts[0] != leave_out}

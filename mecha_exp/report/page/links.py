"""Links from a sweep's page to the files that evaluators left in the folders of its points and inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from mecha_exp.runs.files import FILES, files_of_inputs, files_of_run
from mecha_exp.runs.record import load_all


def links_to_files(folder: Path) -> dict[str, dict[str, str]]:
    """The addresses of the files, relative to the sweep's folder, by the name of the point or input."""
    if not any(folder.glob(f"*/{FILES}")) and not (folder / FILES).is_dir():
        return {}
    named = {record.name: files_of_run(path) for path, record in load_all(folder).items() if record.finished}
    return {
        name: _addresses(files, folder)
        for name, files in {**files_of_inputs(folder), **named}.items()
        if files
    }


def _addresses(files: Mapping[str, Path], folder: Path) -> dict[str, str]:
    return {name: quote(path.relative_to(folder).as_posix()) for name, path in files.items()}

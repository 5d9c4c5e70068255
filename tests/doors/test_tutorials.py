"""The tutorials, as a newcomer follows them: all commands and programs of a page in order, in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.libraries
DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", [page.name for page in sorted(DOCS.glob("tutorial-*.md"))])
def test_every_command_of_a_tutorial_runs(name: str, tmp_path: Path):
    blocks = BLOCK.findall((DOCS / name).read_text(encoding="utf-8"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    assert blocks
    for language, text in blocks:
        command = ["bash", "-ec", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

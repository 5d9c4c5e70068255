"""Machines without a home folder, with one that cannot be written, and with few open files allowed."""

import subprocess
import sys

import pytest
from programs import environment
from safetensors.torch import load_file

COMMAND = [sys.executable, "-m", "mecha_exp", "recipe=weighted_sum", "engine.fuse=always"]

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and ulimit"),
]


@pytest.fixture
def started(tmp_path):
    """Starts the application with other environment variables (None: without) or a limit of open files."""

    def start(files: int | None = None, **changes: str | None) -> subprocess.CompletedProcess[str]:
        variables = {**environment(), **changes}
        for name in ("MECHA_EXP_CACHE", "XDG_CACHE_HOME"):
            variables.pop(name, None)
        limited = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *COMMAND] if files else COMMAND
        return subprocess.run(
            limited,
            cwd=tmp_path,
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return start


@pytest.mark.parametrize("home", [None, "", "/proc", "/dev/null"])
def test_a_merge_needs_no_home_folder(started, tmp_path, home):
    done = started(HOME=home)

    assert done.returncode == 0, done.stderr
    assert len(load_file(next(tmp_path.glob("outputs/runs/*/model.safetensors")))) > 1


@pytest.mark.parametrize("files", (7, 8, 10, 13))
def test_few_open_files_are_enough_or_one_sentence_says_so(started, tmp_path, files):
    done = started(files=files)

    assert "Traceback" not in done.stderr + done.stdout
    if done.returncode:
        assert "oo many" in done.stderr
        assert "ulimit -n" in done.stderr
        said = done.stderr.strip().splitlines()
        assert sum(not line.startswith("WARNING: ") for line in said) == 1, said  # the loop may not be cached
    else:
        assert list(tmp_path.glob("outputs/runs/*/model.safetensors"))

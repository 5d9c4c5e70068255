"""Merges of more models than a process may hold open at first."""

import subprocess
import sys

import pytest
import torch
from programs import environment
from safetensors.torch import save_file

pytest.importorskip("resource", reason="Windows has no such limit")

PROGRAM = """
import resource, sys
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from pathlib import Path
from mecha_exp import MechaError, merge, n_average
try:
    made = merge(n_average(*(f"{i}.safetensors" for i in range(300))), "made.safetensors")
except MechaError as error:
    print(type(error).__name__, error)
else:
    print(made, resource.getrlimit(resource.RLIMIT_NOFILE)[0] > soft)
"""


@pytest.fixture
def merge_under_limits(tmp_path):
    """Merges 300 models in a process that may open `soft` files, and `hard` if it asks; its words."""
    for i in range(300):
        save_file({"w": torch.full((3,), float(i))}, tmp_path / f"{i}.safetensors")

    def run(soft: int, hard: int) -> str:
        words = [sys.executable, "-c", PROGRAM, str(soft), str(hard)]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
        )
        return done.stdout or done.stderr

    return run


def test_the_limit_is_raised_where_the_system_allows_it(merge_under_limits, tmp_path):
    assert merge_under_limits(256, 1024).split() == ["made.safetensors", "True"]
    assert (tmp_path / "made.safetensors").exists()


def test_a_limit_that_cannot_be_raised_is_an_error_that_says_what_to_do(merge_under_limits, tmp_path):
    said = merge_under_limits(256, 256)

    assert said.startswith("MergeError too many files are open: the system allows this process 256")
    assert "ulimit -n" in said
    assert not (tmp_path / "made.safetensors").exists()

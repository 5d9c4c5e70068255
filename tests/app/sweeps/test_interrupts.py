"""Ctrl-C and closed pipes at moments that are easy to get wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import REPOSITORY, environment

INTERRUPTER = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background of some shells

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes of POSIX")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("lazy_loader", "alpha=0.3 output=none"),
        ("mecha_exp.cli", "alpha=0.3 output=none"),
        ("mecha_exp.errors", "alpha=0.3 output=none"),
        ("omegaconf", "alpha=0.3 output=none"),
        ("torch", "alpha=0.3 output=none"),
        ("numpy", "info methods ties"),
        pytest.param("torch.nn", "alpha=0.3 output=none", marks=pytest.mark.heavy),
        pytest.param("torch.library", "alpha=0.3 output=none", marks=pytest.mark.heavy),
        pytest.param("mecha_exp.tracking", "alpha=0.3 output=none", marks=pytest.mark.heavy),
    ],
)
def test_ctrl_c_in_an_import_ends_with_one_line(tmp_path: Path, module: str, words: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER)
    paths = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
    command = [sys.executable, "-m", "mecha_exp", *words.split()]

    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": paths, "INTERRUPT_AT": module},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 130, done.stderr
    assert done.stderr == "error: interrupted. The same command starts again.\n"


@pytest.mark.heavy
def test_a_sweep_whose_reader_has_gone_ends_like_others(tmp_path: Path) -> None:
    """`mecha_exp ... -m | head -1`: what was done is kept, and there is no traceback."""
    words = ["alpha=0.3,0.5", "output=none", "evaluator=none", "tracking=none", "-m", "hydra.sweep.dir=sweep"]
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "mecha_exp", *words],
        cwd=tmp_path,
        env={**environment(), "PYTHONUNBUFFERED": "1"},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        _, errors = process.communicate(timeout=300)

    assert process.returncode == 141, errors
    assert errors == ""
    assert (tmp_path / "sweep" / "sweep.csv").exists()


PRINTER = """
import os, sys
from mecha_exp.terminal.console import stdout
try:
    stdout.print("x" * 100)
    sys.stderr.write("printed")
finally:
    stdout.print("after it")
"""


def test_a_console_without_a_reader_ends_the_process(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", PRINTER],
        env=environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


TWICE = """
import os, signal, sys
from mecha_exp import cli
from mecha_exp.system.imports import leave_on_interrupt

signal.signal(signal.SIGINT, signal.default_int_handler)
leave_on_interrupt()

def interrupted():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:  # what is tidied up after the first one
        os.kill(os.getpid(), signal.SIGINT)

cli._run = interrupted
cli.main()
"""


def test_a_second_ctrl_c_ends_at_once_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE], env=environment(), capture_output=True, text=True, check=False
    )

    assert done.returncode == 130
    assert done.stderr == "error: interrupted. The same command starts again.\n"

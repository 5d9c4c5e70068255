"""A method's signature covers its own code: edits in a copy of the checkout show what makes results stale."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import json
import mecha_exp as m
from mecha_exp.engine.code_hash import code_hashes
from mecha_exp.lab.signature import signature_of

recipe = m.dare_linear("base", "a", "b", density=0.5)
files = {model: str(number) for number, model in enumerate(m.graph.nodes.models_of(recipe))}
signature = signature_of(recipe, files, m.EngineOptions(), {})
print(json.dumps([m.__file__, code_hashes(recipe), signature.digest]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a signature can depend on."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("mecha_exp", "methods", "conf", "model_configs"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def signed(checkout: Path) -> tuple[dict[str, str], str]:
    """The hashes of the methods of a recipe of DARE, and its signature, by the code of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    file, hashes, digest = json.loads(done.stdout)
    assert Path(file).is_relative_to(checkout)
    return hashes, digest


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_a_message_is_not_part_of_a_signature_and_a_helper_of_the_method_is(checkout: Path):
    hashes, digest = before = signed(checkout)

    edit(checkout / "mecha_exp" / "errors.py", " Did you mean {", " Is it {")
    assert signed(checkout) == before

    edit(checkout / "methods" / "dare.py", "d if share == 1 else", "d if share >= 1 else")
    changed, other = signed(checkout)
    assert {name for name in hashes if changed[name] != hashes[name]} == {"dare_linear"}
    assert other != digest

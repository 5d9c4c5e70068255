"""Every example of the documentation runs: commands in `sh` blocks, programs in `python` blocks."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp.cli import VERBS

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)")
PREFIX = "python -m mecha_exp "


def blocks(language: str) -> list[object]:
    return [
        pytest.param(match[2], id=f"{page.name}-{number}")
        for page in PAGES
        for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
        if match[1] == language
    ]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models that the examples name, in the current folder."""
    for seed, name in enumerate(("base", "a", "b", "c")):
        torch.manual_seed(seed)
        tensors = {f"{part}.{i}.weight": torch.randn(4, 4) for part in ("encoder", "decoder") for i in (0, 1)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", blocks("sh"))
def test_the_commands_run(text: str, models: Path, as_a_user):
    commands = [line for line in text.splitlines() if line]

    assert all(line.startswith(PREFIX) for line in commands)
    for line in commands:
        words = shlex.split(line.removeprefix(PREFIX))
        untracked = [] if words[0] in VERBS else ["tracking=none"]
        outcome = as_a_user(*words, *untracked, cwd=models)
        assert outcome.status == 0, outcome.err


@pytest.mark.parametrize("text", blocks("python"))
def test_the_programs_run(text: str, models: Path):
    before = set(models.iterdir())

    exec(compile(text, "example", "exec"), {"__name__": "example"})

    assert set(models.iterdir()) > before, "each example writes a model"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_to_files_lead_somewhere(page: Path):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target

"""The commands of docs/remote.md run, with servers on the loopback in place of the stores that they name."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from hub_server import Hub
from range_server import RangeServer
from safetensors.torch import save, save_file

from mecha_exp import serialize, weighted_sum
from mecha_exp.cli import main

pytestmark = pytest.mark.libraries

PAGE = Path(__file__).parents[2] / "docs" / "remote.md"
PREFIX = "python -m mecha_exp "
COMMANDS = [
    line.removeprefix(PREFIX)
    for block in re.findall(
        r"^```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for line in block.splitlines()
    if line.startswith(PREFIX)
]


@pytest.fixture
def everywhere(server: RangeServer, served: Path, s3_client, monkeypatch, tmp_path: Path):
    """The stores of the page: a hub, a bucket, and a web server, whose address is returned."""
    folder = served / "lab" / "base"
    folder.mkdir(parents=True)
    tensors = {"layers.0.weight": torch.randn(50, 40)}
    for path in (folder / "model.safetensors", served / "base.safetensors"):
        save_file(tensors, path)
    s3_client.create_bucket(Bucket="models")
    s3_client.put_object(
        Bucket="models", Key="expert/model.safetensors", Body=save({k: -t for k, t in tensors.items()})
    )
    with RangeServer(served) as hub:
        hub.fault = Hub(served, server).answer
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.chdir(tmp_path)
        recipe = weighted_sum("hf://lab/base", "s3://models/expert", alpha=0.3)
        Path("recipe.mecha").write_text(serialize(recipe))
        yield server.url


def test_the_page_has_commands():
    assert len(COMMANDS) == 6


def test_the_commands_run(everywhere, monkeypatch, capsys):
    for command in COMMANDS:
        words = shlex.split(command.replace("https://models.example.org", everywhere))
        untracked = [] if words[0] in ("info", "merge", "plan") else ["tracking=none", "evaluator=none"]
        monkeypatch.setattr("sys.argv", ["mecha_exp", *words, *untracked])
        try:
            status = main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        assert status == 0, capsys.readouterr()

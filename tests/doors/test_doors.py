"""The three doors of the README, as a stranger goes through them: from the wheel, in an empty folder."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from state_dicts import write_holes
from wheels import ROOT, Installed

TEXT = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


def door(title: str) -> str:
    """The command that the README shows below a title."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return TEXT.search(readme, readme.index(f"**{title}"))[1]


def with_words(command: str, words: dict[str, str]) -> str:
    """A command with a stranger's own models and data in place of those of the README."""
    for theirs, own in words.items():
        assert theirs in command, command
        command = command.replace(theirs, own)
    return command


def typed(installed: Installed, command: str, folder: Path) -> str:
    """What a command prints, in a shell whose environment is active."""
    path = os.pathsep.join([str(installed.scripts), installed.environment["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env={**installed.environment, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.heavy
def test_the_demo_runs_in_an_empty_folder_and_says_what_comes_next(installed, tmp_path):
    out = typed(installed, "mecha-exp demo", tmp_path)

    assert "$ mecha-exp recipe=ties alpha=0.3,0.5,0.7 -m" in out and "the best of 3 settings" in out
    following = re.search(r"^next, .*: mecha-exp (.*)$", out, re.MULTILINE)[1]
    assert "task_arithmetic" in typed(installed, f"mecha-exp {following} tracking=none", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


@pytest.mark.heavy
def test_two_files_become_one(installed, tmp_path):
    for name, value in (("a", 1.0), ("b", 3.0)):
        save_file({"weight": torch.full((4, 4), value)}, tmp_path / f"{name}.safetensors")
    words = "recipe=weighted_sum models.base=a.safetensors 'models.experts=[b.safetensors]' alpha=0.25"

    typed(installed, f"mecha-exp {words} output.path=merged.safetensors", tmp_path)

    assert load_file(tmp_path / "merged.safetensors")["weight"].unique().tolist() == [1.5]


@pytest.mark.libraries
def test_the_door_of_language_models(installed, tmp_path):
    typed(installed, "python -m mecha_exp.examples.tiny_llm llm", tmp_path)
    own = {
        "hf://org/base": "llm/base",
        "hf://org/math": "llm/sums",
        "hf://org/code": "llm/opposites",
        "arc_easy,gsm8k": "sums,opposites",
        "hub.offline=false": "evaluator.include_path=llm/tasks",
    }

    out = typed(installed, with_words(door("Language models."), own), tmp_path)

    assert "the best of 4 settings" in out
    [best] = re.findall(r"^the best model (.*)$", out, re.MULTILINE)
    assert {"config.json", "tokenizer.json", "README.md"} <= {path.name for path in Path(best).iterdir()}


@pytest.mark.heavy
def test_the_door_of_stable_diffusion(installed, tmp_path):
    of_block = {
        "model.diffusion_model.input_blocks.4.0.in_layers.0.bias": 0.2,
        "model.diffusion_model.output_blocks.4.0.in_layers.0.bias": 0.7,
        "model.diffusion_model.middle_block.0.in_layers.0.bias": 0.5,
    }
    for name, value in (("photo", 0.0), ("anime", 1.0)):
        write_holes(tmp_path / f"{name}.safetensors", "sd1-ldm")
        fill(tmp_path / f"{name}.safetensors", dict.fromkeys(of_block, value))

    typed(installed, door("Stable Diffusion, SDXL, Flux."), tmp_path)

    with safe_open(tmp_path / "merged.safetensors", "pt") as merged:
        for key, strength in of_block.items():
            torch.testing.assert_close(merged.get_tensor(key)[0], torch.tensor(strength, dtype=torch.float16))


def fill(path: Path, values: dict[str, float]) -> None:
    """Write a value into the first entry of some tensors of a file in half precision."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for key, value in values.items():
            file.seek(8 + size + header[key]["data_offsets"][0])
            file.write(torch.tensor(value, dtype=torch.float16).numpy().tobytes())


@pytest.mark.heavy
def test_the_door_of_a_papers_comparison(installed, tmp_path):
    out = typed(installed, door("A paper's comparison."), tmp_path)

    assert r"\begin{tabular}" in out and r"\bottomrule" in out
    [archive] = tmp_path.glob("*.zip")
    assert archive.name in out

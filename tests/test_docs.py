"""The examples of the documentation run; `make lint` checks its links and the files that it names."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp.cli import verbs

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((REPOSITORY / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PREFIX = "python -m mecha_exp "


def blocks(language: str, *marks: pytest.MarkDecorator) -> list[object]:
    """The examples of all pages in a language; those of pages other than the README have the marks.

    Those of tutorials build on each other: `tests/doors` runs them.
    """
    return [
        pytest.param(match[2], id=f"{page.name}-{number}", marks=marks if page.name != "README.md" else ())
        for page in PAGES
        if not page.name.startswith("tutorial-")
        for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
        if match[1] == language
    ]


def save_llama(folder: Path) -> None:
    """A Llama of one layer."""
    folder.mkdir()
    layer = "model.layers.0"
    names = [f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"]
    names += [f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    save_file({name: torch.randn(4, 4) for name in names}, folder / "model.safetensors")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 4)
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, **sizes}
    (folder / "config.json").write_text(json.dumps(config))


def save_towers(folder: Path) -> None:
    """A vision-language model under its names of today and of before, and two text models."""
    text = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")] + ["embed_tokens.weight"]
    vision = [f"blocks.{layer}.attn.qkv.weight" for layer in (0, 1)]
    for name, language, tower, head in (
        ("vlm", "model.language_model.", "model.visual.", "lm_head.weight"),
        ("old_vlm", "language_model.model.", "visual.", "language_model.lm_head.weight"),
        ("text", "model.", None, "lm_head.weight"),
        ("tuned", "model.", None, "lm_head.weight"),
    ):
        keys = [f"{language}{key}" for key in text] + [f"{tower}{key}" for key in vision if tower] + [head]
        (folder / name).mkdir()
        save_file({key: torch.randn(4, 4) for key in keys}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps({"model_type": name}))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models, adapters and configurations of mergekit that the examples name, in the current folder."""
    for seed, name in enumerate(("base", "a", "b", "c")):
        torch.manual_seed(seed)
        tensors = {f"{part}.{i}.weight": torch.randn(4, 4) for part in ("encoder", "decoder") for i in (0, 1)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    for name in ("math", "code"):
        (tmp_path / name).mkdir()
        layer = "base_model.model.encoder.0.lora"
        factors = {f"{layer}_A.weight": torch.randn(2, 4), f"{layer}_B.weight": torch.randn(4, 2)}
        save_file(factors, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    for name, tokens in (("chat", ["a", "b", "<|user|>"]), ("coder", ["b", "}", "a", "<|end|>"])):
        (tmp_path / name).mkdir()
        embedding = {"model.embed_tokens.weight": torch.randn(len(tokens), 4)}
        save_file(embedding, tmp_path / name / "model.safetensors")
        vocabulary = {token: number for number, token in enumerate(tokens)}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": len(tokens)}))
    for name in ("llama_a", "llama_b"):
        save_llama(tmp_path / name)
    save_towers(tmp_path)
    page = (REPOSITORY / "docs" / "mergekit.md").read_text(encoding="utf-8")
    for match in BLOCK.finditer(page):
        if match[1] == "yaml":
            (tmp_path / match[2].splitlines()[0].removeprefix("# ")).write_text(match[2])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", blocks("sh", pytest.mark.heavy))
def test_the_commands_run(text: str, models: Path, as_a_user):
    commands = [line for line in text.splitlines() if line]

    assert all(line.startswith(PREFIX) for line in commands)
    for line in commands:
        words = shlex.split(line.removeprefix(PREFIX))
        untracked = [] if words[0] in verbs() else ["tracking=none"]
        outcome = as_a_user(*words, *untracked, cwd=models)
        assert outcome.status == 0, outcome.err


@pytest.mark.parametrize("text", blocks("python"))
def test_the_programs_run(text: str, models: Path):
    before = set(models.iterdir())

    exec(compile(text, "example", "exec"), {"__name__": "example"})

    is_checked = set(models.iterdir()) > before or "\nassert " in text
    assert is_checked, "each example writes a model, or checks what it shows"

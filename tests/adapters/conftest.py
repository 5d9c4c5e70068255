"""A tiny base model and PEFT adapters of it, written by hand: no library is needed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft_tensors import SHAPES, rand
from safetensors.torch import save_file
from torch import Tensor


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Tensor]:
    """The tensors of the model in the folder `base`."""
    tensors = {key: rand(*shape, seed=100 + number) for number, (key, shape) in enumerate(SHAPES.items())}
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    config = {"architectures": ["ToyForCausalLM"], "num_hidden_layers": 2, "tie_word_embeddings": False}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes the folder of an adapter; the current folder is the one that holds it and the base."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, tensors: dict[str, Tensor], **config: Any) -> str:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "adapter_model.safetensors")
        known = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
        known["base_model_name_or_path"] = "org/base"
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(known | config))
        return name

    return write

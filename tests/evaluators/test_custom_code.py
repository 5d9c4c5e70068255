"""Code in the folder of a model runs where the configuration asks for it, and else not."""

import json
from pathlib import Path

import pytest
import torch
from tiny_tokenizers import write_tokenizer

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import Context, read_scoring

pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path("MARK").touch()

class MineConfig(LlamaConfig):
    model_type = "mine"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of an architecture that transformers does not know, with its code."""
    write_tokenizer(tmp_path / "mine")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "code_of_mine.MineConfig"}, "num_labels": 2}
    (tmp_path / "mine/config.json").write_text(json.dumps(config))
    (tmp_path / "mine/code_of_mine.py").write_text(CODE.replace("MARK", (tmp_path / "has_run").as_posix()))
    torch.save({}, tmp_path / "mine/pytorch_model.bin")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "cat sat on mat", "label": 1}))
    return tmp_path


@pytest.mark.parametrize("name", ["perplexity", "text_classification"])
def test_code_in_the_folder_of_a_model_is_not_run_unless_it_is_trusted(folder: Path, name: str, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "cache"))
    context = Context(inputs={"mine": folder / "mine"})
    asked = {"name": name, "data": str(folder / "data.jsonl"), "device": "cpu"}

    with pytest.raises(ConfigError) as error:
        read_scoring(asked, {"model.embed_tokens.weight": (40, 16)}, context=context)

    assert "custom code" in str(error.value)
    assert not (folder / "has_run").exists()

    with pytest.raises(ConfigError):  # of weights that are not those of a whole model
        shapes = {"model.embed_tokens.weight": (40, 16)}
        read_scoring({**asked, "trust_remote_code": True}, shapes, context=context)
    assert (folder / "has_run").exists()

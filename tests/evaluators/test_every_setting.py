"""Each setting of each evaluator, with values of every kind: it is read, or there is a sentence."""

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from seen import context_of, state_dict
from state_dicts import numbers_of
from tiny_tokenizers import SMALL, write_llama, write_tokenizer

from mecha_exp import Context
from mecha_exp.entry_points import announced
from mecha_exp.errors import MechaError
from mecha_exp.evaluation import read_scoring
from mecha_exp.evaluation.declaration import SETTINGS, WEIGHT_STATS
from mecha_exp.evaluation.registry import GROUP, named_evaluator

transformers = pytest.importorskip("transformers")
pytest.importorskip("lm_eval")
pytest.importorskip("diffusers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

EXAMPLES = Path(__file__).parents[2] / "examples"
NETWORK = "import torch\n\ndef make():\n    return torch.nn.Linear(3, 4)\n"
VALUES = (
    *(None, True, -1, 0, 0.5, 10**20, math.inf, math.nan, "", "x y", ".", "\n", [], [None], [[1]], {}),
    {"a": {}},
)


@pytest.fixture
def asked(vision: Path, pipelines: Path, word_task, tmp_path: Path):
    """Of each evaluator valid settings, the model, and the context."""
    rows = [{"text": f"the cat {number}", "label": number % 2} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "net.py").write_text(NETWORK)
    torch.save({"input": torch.zeros(4, 3)}, tmp_path / "batch.pt")
    save_file({"weight": torch.zeros(4, 3), "bias": torch.zeros(4)}, tmp_path / "net.safetensors")
    llama, bert = write_llama(tmp_path / "llama", 1), tmp_path / "bert"
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=32, num_labels=2, **SMALL)
    transformers.BertForSequenceClassification(config).save_pretrained(bert)
    write_tokenizer(bert)

    def alone(model: Path) -> tuple[dict[str, torch.Tensor], Context]:
        return numbers_of(model), Context("point", inputs={"a": model})

    data, images = {"data": str(tmp_path / "rows.jsonl")}, pipelines / "merged"
    tasks = {"data": str(vision / "data"), "tasks": ["pets", "toys"]}
    of_pipelines = Context("point", inputs={name: pipelines / name for name in "ab"})
    own = {"data": str(tmp_path / "batch.pt"), "module": "net.py:make"}
    return {
        "perplexity": (data, *alone(llama)),
        "lm_eval": ({"tasks": ["word_choice"], "include_path": str(word_task())}, *alone(llama)),
        "text_classification": (data, *alone(bert)),
        "forward": (own, *alone(tmp_path / "net.safetensors")),
        "digits": ({}, *alone(EXAMPLES / "digits/base.safetensors")),
        "mini8": ({}, *alone(EXAMPLES / "mini8/base.safetensors")),
        "image_classification": (tasks, state_dict(vision / "vit"), context_of(vision / "vit")),
        "clip_zero_shot": (tasks, state_dict(vision / "clip"), context_of(vision / "clip")),
        "images": ({"prompts": ["a cat"], "seeds": [0], "steps": 2}, numbers_of(images), of_pipelines),
    }


@pytest.mark.parametrize("name", sorted({*announced(GROUP)} - {WEIGHT_STATS}))
def test_a_value_of_any_kind_is_read_or_answered_in_words(name: str, asked, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    settings, weights, context = asked[name]
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    read_scoring({"name": name, **settings}, shapes, context=context)

    own = [*inspect.signature(named_evaluator(name).score).parameters][1:]
    for parameter in (*own, *(SETTINGS[1:] if name == "digits" else ())):
        for value in VALUES:
            try:
                read_scoring({"name": name, **settings, parameter: value}, shapes, context=context)
            except MechaError as error:
                assert str(error).strip()
            except Exception as error:
                raise AssertionError(f"{parameter}={value!r}: {type(error).__name__}: {error}") from error

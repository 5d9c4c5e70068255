"""Configurations of mergekit that move rows of tokens, and the tiny Llama models with other vocabularies."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.mergekit_configs import TOKENS, model_config, models, write_models

WORDS = [f"t{number}" for number in range(TOKENS)]
CHAT = ["<|user|>", "<|end|>"]
VOCABULARY_KEYS = ("model.embed_tokens.weight", "lm_head.weight")

MOVED = [7, 3, 15, 0, 1, 9, 2, 14, 4, 13, 5, 12, 6, 11, 8, 10]
"""The order of the tokens of the model `moved`."""

TOKEN_MODELS: Mapping[str, tuple[str, list[int], list[str], list[str]]] = {
    "moved": ("b", MOVED, [WORDS[number] for number in MOVED], []),
    "chat": ("a", [*range(16), 3, 5], WORDS, CHAT),
    "words": ("c", [*range(15), 9, 8], [*WORDS[:10], *(f"w{n}" for n in range(6))], CHAT[:1]),
    "padded": ("near", [*range(16), 1, 1, 2, 2], WORDS, []),
}
"""By name the model that it is made of, the rows of its embedding, its tokens and its added tokens."""


def write_token_models(folder: Path) -> None:
    """Write the models of `write_models`, and those with vocabularies of their own."""
    write_models(folder)
    made = models()
    for name, (origin, rows, tokens, added) in TOKEN_MODELS.items():
        (folder / name).mkdir()
        save_file(with_rows(made[origin], rows), folder / name / "model.safetensors", {"format": "pt"})
        config = {**model_config(), "vocab_size": len(rows)}
        (folder / name / "config.json").write_text(json.dumps(config, indent=2))
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer(tokens, added)))
        (folder / name / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"})
        )


def with_rows(tensors: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    """A model with other rows in its embedding and output layer; a row that is there again is scaled."""
    scale = torch.tensor([1 + rows[:place].count(row) / 4 for place, row in enumerate(rows)])[:, None]
    return {
        key: (tensor[list(rows)] * scale).contiguous() if key in VOCABULARY_KEYS else tensor
        for key, tensor in tensors.items()
    }


def tokenizer(tokens: Sequence[str], added: Sequence[str]) -> dict[str, object]:
    """A tokenizer of whole words, and of special tokens that were added."""
    settings = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(tokens) + number, "content": token, **settings, "special": True}
            for number, token in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "unk_token": "t0",
        },
    }


TRANSPLANTS: Mapping[str, tuple[str, ...]] = {
    "omp": ("-a", "omp", "-k", "4"),
    "omp of six": ("-a", "omp", "-k", "6"),
    "mean": ("-a", "mean"),
    "zero": ("-a", "zero"),
    "pieces": ("-a", "subword"),
}
"""By name the words with which `mergekit-tokensurgeon a words OUTPUT` runs."""

TOKEN_CONFIGS: Mapping[str, str] = {
    "a permutation, by the tokens of the base": """\
merge_method: task_arithmetic
base_model: base
models: [{model: a, parameters: {weight: 0.5}}, {model: moved, parameters: {weight: 0.4}}]
tokenizer_source: base
""",
    "a permutation, by its own tokens": """\
merge_method: slerp
base_model: base
models: [{model: moved}]
parameters: {t: 0.3}
tokenizer_source: moved
""",
    "the tokens of one of three": """\
merge_method: linear
models: [{model: base}, {model: moved}, {model: chat}]
parameters: {weight: 1}
tokenizer_source: chat
""",
    "a union with a base": """\
merge_method: task_arithmetic
base_model: base
models: [{model: chat, parameters: {weight: 0.5}}, {model: words, parameters: {weight: 0.3}}]
tokenizer_source: union
""",
    "a union without a base": """\
merge_method: linear
models: [{model: moved}, {model: chat}, {model: words}]
parameters: {weight: 1}
tokenizer_source: union
""",
    "a union of models that share few tokens, padded": """\
merge_method: linear
models: [{model: words, parameters: {weight: 0.7}}, {model: moved, parameters: {weight: 0.2}}]
tokenizer: {source: union, pad_to_multiple_of: 8}
""",
    "rows beyond the tokens are cut": """\
merge_method: slerp
base_model: padded
models: [{model: a}]
parameters: {t: 0.4}
tokenizer_source: base
""",
    "tokens with sources of their own": """\
merge_method: linear
base_model: base
models: [{model: base}, {model: chat}, {model: words}]
parameters: {weight: [1, 2]}
tokenizer:
  source: union
  pad_to_multiple_of: 4
  tokens:
    <|user|>: {source: chat, force: true}
    <|end|>: {source: {kind: zero}}
    t3: {source: {kind: zero}, force: true}
    t5: {source: {kind: model_token, model: chat, token_id: 7}, force: true}
    t11: {source: chat}
    new: {source: {kind: model_token, model: words, token: w2}}
""",
    "slices of models with other tokens": """\
merge_method: passthrough
slices:
  - sources: [{model: chat, layer_range: [0, 2]}]
  - sources: [{model: words, layer_range: [2, 4]}]
tokenizer_source: union
""",
}
"""Each configuration by its name; their models are folders in the current one."""

"""The gates of a mixture: the direction in each layer's input by which an expert is chosen.

Source: mergekit 0.1.5, moe/router.py. Prompts are read one by one here and not padded to one length, so
that `hidden_avg` is the mean over the tokens of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mecha_exp.checkpoint import open_stored, torch_dtype
from mecha_exp.checkpoint.remote import address_of, fetch_small_files
from mecha_exp.checkpoint.sidecars import folder_of
from mecha_exp.errors import ConfigError
from mecha_exp.mergekit.mixtures.reader import CHEAP, HIDDEN_MEAN, RANDOM, UNIFORM, Expert, Mixture

EMBEDDING = "model.embed_tokens.weight"
SEED = 0
"""The seed of gates that are drawn."""

_SMALLEST = 1e-8

States = Callable[[list[int]], torch.Tensor]
"""Gives the states [layers, hidden] of the tokens of a prompt."""


def gates(mixture: Mixture, base: Path, config: Mapping[str, Any], gates_shared: bool = True) -> torch.Tensor:
    """The gates [layers, experts, hidden] in float32, those of shared experts last.

    `random` draws them from N(0, 1), `uniform_random` from +-1/sqrt(hidden). `cheap_embed` is the sum of the
    embeddings of the prompts, `hidden` the mean of the last token's input to each layer, `hidden_avg` of all
    tokens: positive prompts minus negative ones, of length 1.

    Args:
        mixture: with the prompts of its experts.
        base: the file or folder of its base.
        config: the config.json of the base.
        gates_shared: whether shared experts have gates.

    Raises:
        ConfigError: transformers is missing, the tokenizer or the model cannot be loaded.
    """
    experts = (*mixture.experts, *(mixture.shared if gates_shared else ()))
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    generator = torch.Generator().manual_seed(SEED)
    if mixture.gate_mode == RANDOM:
        return torch.randn((layers, len(experts), hidden), generator=generator)
    if mixture.gate_mode == UNIFORM:
        return (torch.rand((layers, len(experts), hidden), generator=generator) * 2 - 1) / math.sqrt(hidden)
    folder = folder_of(base)
    fetch_small_files(folder)
    if mixture.gate_mode != CHEAP and (address := address_of(folder)):
        raise ConfigError(
            f"gate_mode: {mixture.gate_mode} runs the base with transformers, which reads files of this "
            f"machine only, and {address} lies elsewhere. Download it, and name the copy, or set gate_mode: "
            f"{CHEAP}"
        )
    transformers = _transformers(mixture.gate_mode)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if mixture.gate_mode == CHEAP:
            return _cheap_gates(experts, tokenizer, base, layers)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"base_model: transformers cannot load {folder}: {first}") from None
    states = _states_of(model, mixture.gate_mode == HIDDEN_MEAN)
    gates = [_of_prompts(expert, tokenizer, states) for expert in experts]
    return torch.stack(gates, dim=1)


def _transformers(mode: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"gate_mode: {mode} reads prompts with transformers, which is not installed. Install it: pip "
            f"install 'mecha_exp[text]', or set gate_mode: {RANDOM}"
        ) from None
    return transformers


def _of_prompts(expert: Expert, tokenizer: Any, states: States) -> torch.Tensor:
    """The gate of an expert in each layer, [layers, hidden]."""

    def mean(prompts: Sequence[str]) -> torch.Tensor:
        return torch.stack([states(tokens) for tokens in _tokens(prompts, tokenizer)]).mean(0)

    gate = mean(expert.positive)
    if expert.negative:
        gate = gate - mean(expert.negative)
    return _of_length_one(gate)


def _states_of(model: Any, is_mean: bool) -> States:
    """The inputs of the layers of a model: of the last token, or the mean of all."""

    def states(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            output = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        inputs: torch.Tensor = torch.stack(output.hidden_states[:-1])[:, 0]
        state: torch.Tensor = inputs.mean(1) if is_mean else inputs[:, -1]
        return state

    return states


def _cheap_gates(experts: Sequence[Expert], tokenizer: Any, base: Path, layers: int) -> torch.Tensor:
    """The gates of embeddings, which are the same in each layer; rows are read one by one."""
    with open_stored(base) as model:
        dtype, width = torch_dtype(model.info(EMBEDDING).dtype), model.info(EMBEDDING).shape[1]

        def total(prompts: Sequence[str]) -> torch.Tensor:
            rows = torch.zeros(width)
            row = torch.empty(width, dtype=dtype)
            for token in (token for tokens in _tokens(prompts, tokenizer) for token in tokens):
                model.read_into(EMBEDDING, token * width, row)
                rows += row.float()
            return _of_length_one(rows)

        gates = [total(e.positive) - total(e.negative) if e.negative else total(e.positive) for e in experts]
    return torch.stack([_of_length_one(gate) for gate in gates]).repeat(layers, 1, 1)


def _tokens(prompts: Iterable[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of prompts, each after the token that begins a text."""
    begin = tokenizer.bos_token or ""
    listed = [tokenizer(begin + prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    if not all(listed):
        raise ConfigError("positive_prompts and negative_prompts: one of them has no tokens. Remove it.")
    return listed


def _of_length_one(gate: torch.Tensor) -> torch.Tensor:
    length: torch.Tensor = gate.norm(dim=-1, keepdim=True)
    return gate / length.clamp(min=_SMALLEST)

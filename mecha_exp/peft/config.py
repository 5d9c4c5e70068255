"""The configuration of a PEFT adapter, as far as it decides what its tensors add to a model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mecha_exp.checkpoint.model import ADAPTER_CONFIG
from mecha_exp.documents import DocumentError, read_json, typed
from mecha_exp.errors import CheckpointError, Problems, brief
from mecha_exp.numbers import is_number, is_whole
from mecha_exp.sources.source import Source

Number = TypeVar("Number", int, float)

LORA, LOHA, LOKR = "LORA", "LOHA", "LOKR"
KINDS = (LORA, LOHA, LOKR)
"""The kinds of adapters that can be read."""

REASONS = {
    "IA3": "(IA)3 multiplies activations, so what it does is a factor of the weights and not a difference",
    "ADALORA": "its ranks are masked by numbers that a merge does not have",
    "OFT": "it rotates the weights, which is not a difference",
    "BOFT": "it rotates the weights, which is not a difference",
    "VERA": "its random matrices are shared by all layers and made by PEFT itself",
    "PREFIX_TUNING": "it adds tokens and changes no weight",
    "PROMPT_TUNING": "it adds tokens and changes no weight",
    "P_TUNING": "it adds tokens and changes no weight",
}
"""Why adapters of other kinds cannot be read."""

REFUSED = {
    "target_parameters": "factors of single parameters, such as stacked experts, have a form of their own",
    "layer_replication": "the adapter is for a model with layers of the base repeated",
    "alora_invocation_tokens": "it is active only after certain tokens, so no weights do what it does",
    "use_qalora": "its factors act on pooled inputs",
    "use_bdlora": "its factors are of blocks",
    "arrow_config": "it chooses between adapters by the input",
    "kasa_config": "it changes the weights of the base",
    "monteclora_config": "its weights are drawn at random",
    "megatron_config": "its layers are split between machines",
}
"""Entries that say that an adapter does something else than adding products, and what."""

SWITCHES = {
    *("use_rslora", "use_dora", "use_effective_conv2d", "eva_config", "corda_config", "lora_ga_config"),
    *("loftq_config", "velora_config", "runtime_config"),
}
"""Switches that are read, change training alone, or belong to a start that `init_lora_weights` names."""

PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""The values of `init_lora_weights` that leave the weights of the base as they are."""


@dataclass(frozen=True)
class PeftConfig:
    """What decides the differences that an adapter makes.

    Attributes:
        rank, alpha: of modules without an entry in the patterns.
        rank_pattern, alpha_pattern: by the end of a module's name, a regular expression.
        is_rank_stabilised: whether the scale is alpha / sqrt(rank) (rsLoRA) and not alpha / rank.
        fan_in_fan_out: whether weights are stored as (inputs, outputs), as in GPT-2.
        ties_embeddings: whether a change of the embedding is one of the output layer, too.
        base: the name or path of the model that it was trained on; empty where it is not said.
        kind: one of `KINDS`.
        saved: the ends of names of modules that were trained whole (`modules_to_save`).
        tokens: by the end of a module's name the tokens whose rows were trained; of all by an empty one.
        content: all of it.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilised: bool = False
    fan_in_fan_out: bool = False
    ties_embeddings: bool = False
    base: str = ""
    kind: str = LORA
    saved: Sequence[str] = ()
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def rank_of(self, module: str) -> int:
        """The rank of a module, by its name in the model."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module's product: alpha / r, or alpha / sqrt(r)."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def saves(self, module: str) -> bool:
        """Whether a module was trained whole."""
        return any(_ends_with(module, name) for name in self.saved)

    def tokens_of(self, module: str) -> Sequence[int]:
        """The tokens of a module whose rows were trained; a tied output layer has those of its embedding."""
        own = [tokens for name, tokens in self.tokens.items() if not name or _ends_with(module, name)]
        return next(iter(own or self.tokens.values()), ())


def config_of(source: Source) -> PeftConfig | None:
    """The configuration of an adapter's folder; None for any other source.

    Raises:
        CheckpointError: it cannot be read, or the adapter does more than adding to weights.
    """
    if source.path is None or not source.is_adapter:
        return None
    return read_config(source.path)


def read_config(folder: Path) -> PeftConfig:
    """Read `adapter_config.json`; errors as of `config_of`."""
    path = folder / ADAPTER_CONFIG
    try:
        content = typed(read_json(path), dict[str, Any])
    except (OSError, DocumentError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    return parse_config(content, path)


def parse_config(content: Mapping[str, Any], path: Path) -> PeftConfig:
    """The configuration in the content of a file; errors as of `config_of`, which name the path."""
    _check_kind(content, path)
    return _parse(content, path)


def _check_kind(content: Mapping[str, Any], path: Path) -> None:
    """Check that an adapter adds products to weights, and does nothing else."""
    kind = str(content.get("peft_type") or "none").upper()
    if kind not in KINDS:
        reason = REASONS.get(kind, "only LoRA, DoRA, LoHa and LoKr are read")
        raise CheckpointError(
            f"{path}: peft_type {kind}: {reason}. Merge it into its model with PEFT first "
            "(merge_and_unload, save_pretrained) and name that folder."
        )
    problems = Problems()
    for entry, reason in REFUSED.items():
        if content.get(entry):
            problems.add(f"{path}: {entry}: {reason}. It cannot be read as differences.")
    for entry in content.keys() - REFUSED.keys() - SWITCHES:
        if re.fullmatch(r"use_\w+|\w+_config", entry) and content[entry]:
            problems.add(
                f"{path}: {entry}: it is not known what this setting of a newer PEFT adds to the weights. "
                "Merge the adapter into its model with PEFT first (merge_and_unload, save_pretrained)."
            )
    start = content.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        problems.add(
            f"{path}: init_lora_weights {start!r} changes the weights of the base when training starts, so "
            "the factors are not a difference to them. Save it as a LoRA of the plain base with PEFT: "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    problems.raise_as(CheckpointError)


def _parse(content: Mapping[str, Any], path: Path) -> PeftConfig:
    problems = Problems()

    def number(entry: str, value: Any, whole: bool = False) -> float:
        if not (is_whole(value, least=1) if whole else is_number(value)):
            expected = "a whole number of at least 1" if whole else "a number"
            problems.add(f"{path}: {entry}: expected {expected}, got {brief(value)}.")
            return 1
        return value  # type: ignore[no-any-return]

    def pattern(entry: str, whole: bool) -> dict[str, Any]:
        entries = content.get(entry) or {}
        if not isinstance(entries, dict):
            problems.add(f"{path}: {entry}: expected numbers by the names of modules, got {brief(entries)}.")
            return {}
        for expression in entries:
            try:
                re.compile(expression)
            except re.error as error:
                problems.add(f"{path}: {entry}: {expression!r} is not a regular expression: {error}.")
        return {name: number(f"{entry}.{name}", value, whole) for name, value in entries.items()}

    def tokens() -> dict[str, list[int]]:
        entry = "trainable_token_indices"
        value = content.get(entry) or {}
        by_module = value if isinstance(value, dict) else {"": value}
        for indices in by_module.values():
            if not isinstance(indices, list) or not all(is_whole(index, least=0) for index in indices):
                problems.add(f"{path}: {entry}: expected lists of numbers of tokens, got {brief(value)}.")
                return {}
        return by_module

    ranks, alphas = pattern("rank_pattern", True), pattern("alpha_pattern", False)
    rank = number("r", content.get("r", 8), whole=True)
    kind = str(content["peft_type"]).upper()
    entry = "lora_alpha" if kind == LORA else "alpha"
    alpha, trained = number(entry, content.get(entry, 8)), tokens()
    saved = content.get("modules_to_save")
    problems.raise_as(CheckpointError)
    return PeftConfig(
        int(rank),
        alpha,
        ranks,
        alphas,
        bool(content.get("use_rslora")),
        bool(content.get("fan_in_fan_out")),
        bool(content.get("ensure_weight_tying")),
        str(content.get("base_model_name_or_path") or ""),
        kind,
        tuple(map(str, saved)) if isinstance(saved, list) else (),
        trained,
        content,
    )


def _ends_with(module: str, name: str) -> bool:
    """Whether a module is called so, alone or within others; PEFT's rule."""
    return module == name or module.endswith(f".{name}")


def _by_pattern(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that a module's name ends with; PEFT's rule."""
    for expression, value in patterns.items():
        if re.match(rf"(.*\.)?({expression})$", module):
            return value
    return default

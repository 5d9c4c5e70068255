"""Reads the format of mergekit-moe's configurations: which models become experts, and how they are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mecha_exp.errors import ConfigError, brief, did_you_mean
from mecha_exp.mergekit.references import Reference, read_reference
from mecha_exp.mergekit.settings import check_known, output_dtype, read_each, read_entries
from mecha_exp.numbers import is_number, is_whole

RANDOM, UNIFORM, CHEAP, HIDDEN = "random", "uniform_random", "cheap_embed", "hidden"
HIDDEN_MEAN, HIDDEN_LAST = "hidden_avg", "hidden_last"
GATE_MODES = (HIDDEN, HIDDEN_MEAN, HIDDEN_LAST, CHEAP, RANDOM, UNIFORM)
"""How gates are made: of prompts, or drawn."""

_WORDS = (
    *("base_model", "experts", "shared_experts", "gate_mode", "dtype", "experts_per_token", "architecture"),
    "name",
)
_OF_EXPERT = ("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale")


@dataclass(frozen=True)
class Expert:
    """A model whose feed-forward layers become an expert.

    Attributes:
        reference: the model.
        positive, negative: prompts that the expert is for, and those that it is not for.
        scale: what its output is multiplied by.
        where: its place in the configuration, for messages.
    """

    reference: Reference
    positive: tuple[str, ...]
    negative: tuple[str, ...]
    scale: float
    where: str


@dataclass(frozen=True)
class Mixture:
    """A configuration of mergekit-moe.

    Attributes:
        base: the model of all that is not an expert.
        experts: those that are chosen from.
        shared: those that every token has.
        gate_mode: how gates are made.
        per_token: how many experts a token has.
        dtype: of the output; None is that of the base.
        architecture: the beginning of the output's name, or empty.
    """

    base: Reference
    experts: tuple[Expert, ...]
    shared: tuple[Expert, ...]
    gate_mode: str
    per_token: int
    dtype: str | None
    architecture: str

    @property
    def references(self) -> list[Reference]:
        """Every model that is named, the base first."""
        experts = (expert.reference for expert in (*self.experts, *self.shared))
        return list(dict.fromkeys([self.base, *experts]))

    @property
    def uses_prompts(self) -> bool:
        """Whether gates are made of prompts."""
        return self.gate_mode not in (RANDOM, UNIFORM)

    def require_prompts(self, expert: Expert) -> None:
        """Raise ConfigError for an expert without prompts where its gate is made of them."""
        if self.uses_prompts and not expert.positive:
            raise ConfigError(
                f"{expert.where}: gate_mode {self.gate_mode} makes gates of prompts, and there are no "
                f"positive_prompts. Give some, or set gate_mode: {RANDOM}"
            )


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of mergekit-moe."""
    return "experts" in config


def read_mixture(config: Mapping[str, Any]) -> Mixture:
    """Read the content of a configuration of mergekit-moe.

    Raises:
        ConfigError: an unknown word, a missing prompt, or something that is not supported.
    """
    check_known(config, _WORDS, "configuration")
    experts = _experts(config["experts"], "experts")
    shared = _experts(config["shared_experts"], "shared_experts") if config.get("shared_experts") else ()
    mode = config.get("gate_mode", HIDDEN)
    if mode not in GATE_MODES:
        raise ConfigError(f"gate_mode: unknown mode {brief(mode)}.{did_you_mean(str(mode), GATE_MODES)}")
    count = config.get("experts_per_token", 2)
    if not is_whole(count, least=1) or count > len(experts):
        raise ConfigError(
            f"experts_per_token: expected a whole number from 1 to {len(experts)}, the number of experts, "
            f"got {brief(count)}."
        )
    base = _model(config.get("base_model"), "base_model")
    architecture = str(config.get("architecture") or "")
    mixture = Mixture(base, experts, shared, mode, count, output_dtype(config), architecture)
    _require_prompts(mixture)
    return mixture


def _experts(config: Any, where: str) -> tuple[Expert, ...]:
    entries = enumerate(read_entries(config, where))
    return tuple(read_each(lambda entry: _expert(entry[1], f"{where}[{entry[0]}]"), entries))


def _expert(config: Mapping[str, Any], where: str) -> Expert:
    check_known(config, _OF_EXPERT, where)
    if config.get("noise_scale"):
        raise ConfigError(
            f"{where}.noise_scale: noise is not added to experts here, so that a merge gives the same bytes "
            "each time. Remove it."
        )
    scale = config.get("residual_scale")
    if scale is not None and not (is_number(scale) and math.isfinite(scale)):
        raise ConfigError(f"{where}.residual_scale: expected a number, got {brief(scale)}.")
    reference = _model(config.get("source_model"), f"{where}.source_model")
    positive = _prompts(config.get("positive_prompts"), f"{where}.positive_prompts")
    negative = _prompts(config.get("negative_prompts"), f"{where}.negative_prompts")
    return Expert(reference, positive, negative, 1.0 if scale is None else float(scale), where)


def _model(config: Any, where: str) -> Reference:
    reference = read_reference(config, where)
    if reference.lora:
        raise ConfigError(
            f"{where}: {reference} has an adapter, which is not added to experts here. Merge it into its "
            "model first."
        )
    return reference


def _prompts(config: Any, where: str) -> tuple[str, ...]:
    if config is None:
        return ()
    if not isinstance(config, list) or not all(isinstance(prompt, str) for prompt in config):
        raise ConfigError(f"{where}: expected a list of texts, got {brief(config)}.")
    return tuple(config)


def _require_prompts(mixture: Mixture) -> None:
    """Check that gates made of prompts have prompts, and that these tell the experts apart."""
    for expert in mixture.experts:
        mixture.require_prompts(expert)
    prompts = {(expert.positive, expert.negative) for expert in mixture.experts}
    if mixture.uses_prompts and len(prompts) == 1 and len(mixture.experts) > 1:
        raise ConfigError(
            "experts: all have the same prompts, so that their gates would be equal. Give each its own, or "
            f"set gate_mode: {RANDOM}"
        )

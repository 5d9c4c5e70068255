"""What `config.json` beside a model says of the arithmetic that its weights are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mecha_exp.checkpoint.sidecars import config_beside
from mecha_exp.errors import brief
from mecha_exp.sources.source import Source

_DECISIVE = (
    *("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"),
    *("hidden_act", "hidden_activation", "activation_function"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    *("max_position_embeddings", "n_positions", "sliding_window"),
)
"""Entries that say what is computed with weights, and that no shape tells."""

_OF_THE_WHOLE = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id")
"""Such entries of a whole model, which has one kind and one set of tokens with a meaning."""


def different_settings(sources: Iterable[Source]) -> Iterator[str]:
    """A line about each model whose weights are for other arithmetic than those of the first one.

    Entries of both configurations are compared: what one lacks has a default, which only its loader knows.
    """
    beside = {source.name: config_beside(source.path) for source in sources}
    known = [(name, _settings(config)) for name, config in beside.items() if config]
    for name, own in known[1:]:
        first, settings = known[0]
        different = [
            f"{entry} is {brief(settings[entry])} in {first} and {brief(own[entry])} in {name}"
            for entry in settings
            if entry in own and own[entry] != settings[entry]
        ]
        if different:
            yield (
                f"config.json: {'; '.join(different)}. Weights work with the settings that they were trained "
                f"with, and a folder that is written has those of {first}: measure whether the merge works"
            )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decisive entries of a configuration, with rotary embeddings as transformers 5 has them."""
    text = _section(config, "text_config") or config
    settings = {entry: config[entry] for entry in _OF_THE_WHOLE if config.get(entry) is not None}
    settings |= {entry: text[entry] for entry in _DECISIVE if text.get(entry) is not None}
    rope = _section(text, "rope_parameters") or _section(text, "rope_scaling")
    theta = rope.get("rope_theta", text.get("rope_theta"))
    if not isinstance(theta, int | float):
        return settings
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return {**settings, "rope_theta": float(theta), "rope_type": kind}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping within a configuration; empty where it has none of that name."""
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}

"""The classes of transformers that have a head beside a base model, built without values."""

import warnings

import pytest
import torch

TASKS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "CausalLM", "MaskedLM")
ENDINGS = tuple(f"For{task}" for task in (*TASKS, "ImageClassification"))


def with_heads() -> dict:
    """The classes of transformers with heads, by name, as its auto classes list them."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto

    mappings = [value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    values = [value for mapping in mappings for value in mapping.values() if value]
    names = {name for value in values for name in ([value] if isinstance(value, str) else value)}
    return {name: getattr(transformers, name) for name in sorted(names) if name.endswith(ENDINGS)}


def made(cls):
    """A model of default sizes without values, two layers deep where its config lets that be; None if not."""
    for depth in (2, None):
        try:
            config = cls.config_class()
            for word in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layer"):
                if depth and isinstance(getattr(config, word, None), int):
                    setattr(config, word, min(depth, getattr(config, word)))
            for word in ("layer_types", "mlp_layer_types"):
                if depth and isinstance(getattr(config, word, None), list):
                    setattr(config, word, getattr(config, word)[:depth])
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return cls(config)
        except Exception:  # what a default config cannot build, or a library that is not installed
            continue
    return None

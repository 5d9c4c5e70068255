"""Configurations of mergekit-moe, and the tiny Llama models whose tokenizers can read prompts."""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.support.mergekit_configs import write_models

PROMPTS = """\
  - source_model: a
    positive_prompts: [t3 t5, t9 t8]
    negative_prompts: [t4 t4]
  - source_model: b
    positive_prompts: [t7 t2]
"""

MIXTURE_CONFIGS: Mapping[str, str] = {
    "gates of embeddings": f"base_model: base\ngate_mode: cheap_embed\nexperts:\n{PROMPTS}",
    "gates of embeddings, an expert scaled, in bfloat16": f"""\
base_model: base
gate_mode: cheap_embed
experts_per_token: 1
dtype: bfloat16
experts:
{PROMPTS}    residual_scale: 0.5
""",
    "gates of hidden states": f"base_model: base\nexperts:\n{PROMPTS}",
    "gates of mean hidden states": f"base_model: base\ngate_mode: hidden_avg\nexperts:\n{PROMPTS}",
    "a shared expert": f"""\
base_model: base
architecture: qwen
gate_mode: cheap_embed
experts:
{PROMPTS}shared_experts:
  - source_model: base
    positive_prompts: [t1]
    residual_scale: 0.1
""",
    "a shared expert without a gate": f"""\
base_model: base
gate_mode: cheap_embed
experts:
{PROMPTS}shared_experts:
  - source_model: base
    residual_scale: 0.1
""",
    "DeepSeek without a shared expert": f"""\
base_model: base
architecture: deepseek
gate_mode: cheap_embed
experts_per_token: 1
experts:
{PROMPTS}""",
}
"""Each configuration by its name; their models are folders in the current one."""


def write_mixture_models(folder: Path) -> None:
    """Write the models of `write_models`, with tokens that begin and end a text."""
    write_models(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t2"}
    for file in folder.glob("*/tokenizer_config.json"):
        file.write_text(json.dumps({**settings, "unk_token": "t0"}))

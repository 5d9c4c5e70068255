"""A package `vllm` whose engine is transformers, so that the code of lm_eval around the real one runs.

The real one is gigabytes, so these tests run without it. This shows that lm_eval takes what it is given and
what comes of the answers, and nothing about vllm's own numbers. `test_vllm.py` runs the real one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

VERSION = "0.11.0"
FILES = {
    "vllm/__init__.py": """
from types import SimpleNamespace
import torch
from transformers import AutoModelForCausalLM

started, ended = [], []  # the arguments of each engine

def TokensPrompt(**values):
    return values

class SamplingParams:
    def __init__(self, **values):
        self.values = values

class LLM:
    def __init__(self, **arguments):
        if arguments.get("gpu_memory_utilization") == 1:
            raise RuntimeError("Engine core initialization failed.")
        started.append(arguments)
        self.network = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=arguments["dtype"])
        length = arguments["max_model_len"] or self.network.config.max_position_embeddings
        core = SimpleNamespace(shutdown=lambda: ended.append(arguments))
        settings = SimpleNamespace(max_model_len=length)
        self.llm_engine = SimpleNamespace(model_config=settings, engine_core=core)

    def generate(self, prompts, sampling_params, use_tqdm, lora_request):
        return [self.answer(prompt["prompt_token_ids"]) for prompt in prompts]

    @torch.inference_mode()
    def answer(self, ids):
        rows = self.network(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        listed = [{n: float(row[n]) for n in (token, int(row.argmax()))} for row, token in zip(rows, ids[1:])]
        return SimpleNamespace(prompt_logprobs=[None, *listed])
""",
    "vllm/lora/__init__.py": "",
    "vllm/lora/request.py": "LoRARequest = None",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/chat_utils.py": "def resolve_hf_chat_template(**values):\n    return None",
    "vllm/platforms.py": """
from types import SimpleNamespace

current_platform = SimpleNamespace(device_type="cuda")
""",
    "vllm/tokenizers.py": """
from transformers import AutoTokenizer

def get_tokenizer(name, tokenizer_mode, revision, **more):
    return AutoTokenizer.from_pretrained(name, **more)
""",
}


@contextmanager
def vllm_there(folder: Path, distribution: str = "vllm") -> Iterator[None]:
    """Have the package installed in a folder, for the length of a block, by a distribution of this name."""
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {VERSION}\n",
        "top_level.txt": "vllm",
    }
    about = {f"{distribution}-{VERSION}.dist-info/{name}": text for name, text in metadata.items()}
    for name, content in {**FILES, **about}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import_module("lm_eval.models")  # registers its models
        registry = import_module("lm_eval.api.registry")
        registry._materialise_placeholder.cache_clear()
        models = registry.model_registry._objs
        patch.setitem(models, "vllm", models["vllm"])  # the class that takes this place leaves it again
        try:
            yield
        finally:
            for name in [
                n for n in sys.modules if n.partition(".")[0] == "vllm" or n.endswith(".vllm_causallms")
            ]:
                del sys.modules[name]

"""Trials as mergekit-evolve runs them: a configuration, `run_merge` into a folder, the model read from it.

    MERGEKIT/bin/python -m bench.mergekit_trials FOLDER

It runs in mergekit's own environment, and `bench.search_llamas` starts it. FOLDER has the models `base`,
`expert_0` and so on, `documents.jsonl`, and `trials.json`, a list with the weights of the experts for each
trial. The wall and CPU seconds of all trials and the bits per byte of each go to the standard output as JSON.
mergekit's own program does the same in actors of Ray, which need a GPU each (`mergekit/evo/helpers.py`).
"""

import json
import math
import shutil
import sys
import time
from pathlib import Path

import torch
import transformers
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

OPTIONS = MergeOptions(quiet=True, write_model_card=False)


def merged(folder: Path, weights: list[float]) -> Path:
    """The folder of the merge with these weights."""
    experts = [
        {"model": str(folder / f"expert_{n}"), "parameters": {"weight": w}} for n, w in enumerate(weights)
    ]
    content = {
        "merge_method": "task_arithmetic",
        "base_model": str(folder / "base"),
        "models": experts,
        "dtype": "float32",
    }
    output = folder / "merged"
    run_merge(MergeConfiguration.model_validate(content), str(output), OPTIONS)
    return output


def bits_per_byte(folder: Path, texts: list[str]) -> float:
    """What `evaluator=perplexity` measures, of documents that fit into one window."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    nats = 0.0
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            logits = model(torch.tensor([[tokenizer.bos_token_id, *ids[:-1]]])).logits[0]
            chosen = logits.float().log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None])
            nats -= float(chosen.double().sum())
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def main(name: str) -> None:
    """Run the trials of a folder."""
    folder = Path(name)
    texts = [json.loads(line)["text"] for line in (folder / "documents.jsonl").read_text().splitlines()]
    trials = json.loads((folder / "trials.json").read_text())
    values = []
    began, cpu = time.monotonic(), time.process_time()
    for number, weights in enumerate([trials[0], *trials]):
        if number == 1:  # the first one only warms up
            began, cpu = time.monotonic(), time.process_time()
        output = merged(folder, weights)
        values.append(bits_per_byte(output, texts))
        shutil.rmtree(output)
    seconds = [time.monotonic() - began, time.process_time() - cpu]
    json.dump({"seconds": seconds, "values": values[1:]}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])

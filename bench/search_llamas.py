"""Trials a second of a search over tiny Llamas, beside mergekit-evolve's way with mergekit itself.

    python -m bench.search_llamas --trials 100 --mergekit .parity/mergekit/bin/python --save

The models and the documents are made, not downloaded. Both ways make the same merges and measure the same
bits per byte, which is checked. `make parity` installs mergekit in an environment of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.report import machine, make_parser, publish, table
from bench.search import cpu_of_children, seconds_of_trials

REPOSITORY = Path(__file__).parents[1]
HEAD = ["way", "trials", "seconds", "CPU seconds", "trials a second"]
Seconds = tuple[float, float | None]
"""Of the clock, and of the processors where they are known."""
TOLERANCE = 1e-4
"""How much the bits per byte of both ways may differ: the order of float32 sums."""
_EXPERTS, _WORDS, _LENGTH = 3, 1000, 40
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": _WORDS + 3,
}


def write_models(folder: Path) -> int:
    """A base and experts a little off it, with a tokenizer; returns the parameters of one."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, initializer_range=0.1))
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *_words()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    values = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    for name in ("base", *(f"expert_{number}" for number in range(_EXPERTS))):
        if name != "base":
            base.load_state_dict({k: v + 0.02 * torch.randn_like(v) for k, v in values.items()})
        base.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return sum(tensor.numel() for tensor in base.parameters())


def write_documents(folder: Path, count: int) -> Path:
    """Documents of random words, of one window each."""
    draw, words, path = random.Random(0), _words(), folder / "documents.jsonl"
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=_LENGTH))}) for _ in range(count)]
    path.write_text("\n".join(lines))
    return path


def _words() -> list[str]:
    return [f"w{number}" for number in range(_WORDS)]


def search(folder: Path, documents: Path, trials: int) -> tuple[Seconds, list[list[float]], list[float]]:
    """Search from the command to the report; returns its seconds, and the weights and value of each trial."""
    experts = ",".join(str(folder / f"expert_{number}") for number in range(_EXPERTS))
    words = [
        *("sweep=search", f"sweep.trials={trials}", "recipe=task_arithmetic", "alpha=1"),
        *(f"models.base={folder / 'base'}", f"models.experts=[{experts}]", "weights.*=interval(0,1)"),
        *("evaluator=perplexity", f"evaluator.data={documents}", "evaluator.weight_stats=false"),
        *("output=none", "tracking=none", "hydra.sweep.dir=s", "store=store"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "mecha_exp", *words]
    began, cpu = time.monotonic(), cpu_of_children()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began, cpu_of_children() - cpu
    records = [json.loads((folder / "s" / str(n) / "run.json").read_text()) for n in range(trials)]
    weights = [[float(weight) for weight in record["parameters"]["weights"]] for record in records]
    return seconds, weights, [record["metrics"]["bits_per_byte"] for record in records]


def one_by_one(
    folder: Path, mergekit: str, weights: Sequence[Sequence[float]]
) -> tuple[Seconds, list[float]]:
    """The same trials with mergekit, one after another; returns their seconds alone, and their values."""
    (folder / "trials.json").write_text(json.dumps(weights))
    command = [mergekit, "-m", "bench.mergekit_trials", str(folder)]
    ran = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    content = json.loads(ran.stdout[ran.stdout.index('{"seconds"') :])
    return tuple(content["seconds"]), content["values"]


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--mergekit", default=".parity/mergekit/bin/python", help="Python that has mergekit")
    options = parser.parse_args()
    if not Path(options.mergekit).is_file():
        parser.error(f"there is no {options.mergekit}: `make parity` installs mergekit, or name its Python")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters, documents = write_models(folder), write_documents(folder, options.documents)
        seconds, weights, values = search(folder, documents, options.trials)
        alone = seconds_of_trials(folder / "s")
        theirs, their_values = one_by_one(folder, options.mergekit, weights)
    if max(values) - min(values) < 100 * TOLERANCE:
        sys.exit("the trials hardly differ, so that they show nothing")
    apart = max(abs(a - b) for a, b in zip(values, their_values, strict=True))
    if apart > TOLERANCE:
        sys.exit(f"the bits per byte of both ways differ by {apart:g}: they do not do the same work")
    ways: list[tuple[str, Seconds]] = [
        ("search, from command to report", seconds),
        ("search, its trials alone", (alone, None)),
        ("mergekit: one merge, one folder, one evaluation each", theirs),
    ]
    rows = [
        [
            way,
            str(len(values)),
            f"{wall:.1f}",
            "-" if cpu is None else f"{cpu:.1f}",
            f"{len(values) / wall:.2f}",
        ]
        for way, (wall, cpu) in ways
    ]
    text = (
        f"{table([HEAD, *rows])}\n\n{machine()}, load {os.getloadavg()[1]:.1f}; task arithmetic of "
        f"{_EXPERTS} experts, Llamas of {parameters / 1e6:.1f} million parameters in float32, "
        f"{options.documents} documents of {_LENGTH} words. The bits per byte of both differ by {apart:.1g} "
        "at most. The last row is a loop in one process that has imported everything: without a sampler, "
        "records or a report."
    )
    publish("Searching language models", text, save=options.save)


if __name__ == "__main__":
    main()

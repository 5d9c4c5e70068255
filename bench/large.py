"""Large models on a disk, cold: seconds and peak memory beside `dd` and mergekit.

    python -m bench.large --disk /var/tmp --layers 2          a quick look, 2.9 GB a model
    python -m bench.large --disk /var/tmp --save              Llamas of 8B shape, 16 GB a model
    python -m bench.large --layers 2 --vocabulary 16032       1.1 GB a model
    python -m bench.large --mergekit .bench/mergekit/bin/mergekit-yaml
    python -m bench.large --parts                             what of a merge the journal and SHA-256 take

The models are made, not trained: bfloat16, in shards of 5 GB. Before each run the files leave the cache
(`posix_fadvise`). The floor is `dd` with O_DIRECT: a reader for each model and a writer of one output, all
at the same time. Each run is a process of its own, imports included, and ends when its output is on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from shlex import quote
from unittest import mock

import torch

from bench.models import drawn_values
from bench.report import as_for_users, machine, make_parser, publish, table
from mecha_exp.checkpoint import Destination
from mecha_exp.checkpoint.transaction.journal import Journal
from mecha_exp.lab.content_hash import content_of

HIDDEN, INNER, KEYS_AND_VALUES, VOCABULARY = 4096, 14336, 1024, 128_256
SHARD_BYTES = 5_000_000_000
_CHUNK = 1 << 22
_DIRECT = ["bs=16M", "status=none"]
WORKS = {"weighted sum of 2": 2, "TIES, 2 experts": 3}


def main() -> None:
    """Make the models, measure each work by each tool in turns, print, and save if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where models and outputs lie")
    parser.add_argument("--layers", type=int, default=32, help="of the models (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="its size (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=WORKS, default=[*WORKS], help="only these")
    parser.add_argument("--mergekit", type=Path, help="its program mergekit-yaml; without it we are alone")
    parser.add_argument("--peer-repeat", type=int, default=1, help="runs of mergekit (default: %(default)s)")
    parser.add_argument("--parts", action="store_true", help="the journal's and SHA-256's shares instead")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        merge(*options.work)
        return
    folder = options.disk / "mecha_exp_large"
    sizes = options.layers, options.vocabulary
    name = "-".join(map(str, sizes))
    models = [make_llama(folder / f"{name}-{n}", *sizes, n) for n in range(max(WORKS.values()))]
    if options.parts:
        text = f"{table(parts(models, folder / 'output'))}\n\n{machine()}; {options.layers} layers."
        publish("What the journal and SHA-256 take of a large merge", text, save=options.save)
        return
    rows = [["work", "tool", "seconds", "of the floor", "processor", "peak memory"]]
    for work in options.cases:
        rows += rows_of(work, models[: WORKS[work]], folder / "output", options)
    nbytes = sum(path.stat().st_size for path in models[0].glob("*.safetensors"))
    end = f"{machine()}; {nbytes / 1e9:.1f} GB a model, on {options.disk}; medians of {options.repeat}."
    if options.mergekit:
        end += f" mergekit: {options.peer_repeat}."
    text = f"{table(rows)}\n\n{end}"
    publish("Large models on a disk", text, save=options.save)


def rows_of(work: str, models: Sequence[Path], output: Path, options: argparse.Namespace) -> list[list[str]]:
    """Measure a work by all tools, which take turns."""
    paths = [str(path) for path in models]
    commands = {"mecha_exp": [sys.executable, "-m", "bench.large", "--work", work, str(output), *paths]}
    if options.mergekit:
        config = output.with_suffix(".yml")
        config.write_text(json.dumps(mergekit_config(work, paths)))  # JSON is YAML
        plain = [str(options.mergekit), str(config), str(output), "--lazy-unpickle"]
        commands |= {"mergekit": plain, "mergekit, --low-cpu-memory": [*plain, "--low-cpu-memory"]}
    runs: dict[str, list[tuple[float, float, int]]] = {"dd": [], **{tool: [] for tool in commands}}
    for turn in range(options.repeat):
        runs["dd"].append((cold(models, lambda: copied_by_dd(models, output)), 0.0, 0))
        for tool, command in commands.items():
            if tool == "mecha_exp" or turn < options.peer_repeat:
                runs[tool].append(measured(models, command))
            shutil.rmtree(output, ignore_errors=True)
    medians = {tool: [statistics.median(part) for part in zip(*of, strict=True)] for tool, of in runs.items()}
    floor = medians["dd"][0]
    return [
        [work, tool, f"{seconds:.1f} s", f"{seconds / floor:.2f}"]
        + ([f"{processor:.1f} s", f"{peak / 1e9:.2f} GB"] if peak else ["-", "-"])
        for tool, (seconds, processor, peak) in medians.items()
    ]


def measured(models: Sequence[Path], command: Sequence[str]) -> tuple[float, float, int]:
    """Seconds, processor seconds and the peak memory in bytes of a process that must succeed."""
    used: list[resource.struct_rusage] = []

    def run() -> None:
        process = subprocess.Popen(command, env=as_for_users(), stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{' '.join(command)} failed")
        used.append(usage)

    seconds = cold(models, run)
    return seconds, used[0].ru_utime + used[0].ru_stime, used[0].ru_maxrss * 1024


def cold(models: Sequence[Path], work: Callable[[], object]) -> float:
    """The seconds of a work that finds none of the models in the cache."""
    os.sync()
    for model in models:
        for path in model.glob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    work()
    os.sync()
    return time.perf_counter() - started


def copied_by_dd(models: Sequence[Path], output: Path) -> None:
    """Read every model and write one, side by side, past the cache."""
    shards = [sorted(map(str, model.glob("*.safetensors"))) for model in models]
    reading = [
        " && ".join(f"dd if={quote(s)} of=/dev/null iflag=direct {' '.join(_DIRECT)}" for s in of)
        for of in shards
    ]
    nbytes = sum(Path(shard).stat().st_size for shard in shards[0])
    whole, rest = divmod(nbytes, 1 << 24)
    target = output.with_suffix(".dd")
    writing = (
        f"dd if=/dev/zero of={quote(str(target))} oflag=direct count={whole + bool(rest)} {' '.join(_DIRECT)}"
    )
    processes = [subprocess.Popen(command, shell=True) for command in (*reading, writing)]
    codes = [process.wait() for process in processes]
    target.unlink()
    if any(codes):
        sys.exit("dd failed")


def merge(work: str, output: str, *models: str) -> None:
    """Do a work by mecha_exp."""
    import mecha_exp as me

    base, *others = models
    if work.startswith("TIES"):
        me.merge(me.ties(base, *others, density=0.2, weights=0.5), Path(output))
    else:
        me.merge(me.weighted_sum(base, others[0], alpha=0.3), Path(output))


def parts(models: Sequence[Path], output: Path) -> list[list[str]]:
    """The seconds of a weighted sum, of its journal in all threads, and of its output's SHA-256."""
    journal = 0.0

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            nonlocal journal
            began = time.perf_counter()
            method(*arguments)
            journal += time.perf_counter() - began

        return call

    with mock.patch.multiple(Journal, finish=timed(Journal.finish), flush=timed(Journal.flush)):
        seconds = cold(models, lambda: merge("weighted sum", str(output), *map(str, models[:2])))
    began = time.perf_counter()
    content_of(output)
    hashed = time.perf_counter() - began
    shutil.rmtree(output)
    named = {"weighted sum of 2": seconds, "of which the journal": journal, "SHA-256 of the output": hashed}
    rows = [[name, f"{taken:.2f} s", f"{100 * taken / seconds:.1f} %"] for name, taken in named.items()]
    return [["part", "seconds", "of the merge"], *rows]


def mergekit_config(work: str, models: Sequence[str]) -> dict[str, object]:
    """The same by mergekit."""
    base, *others = models
    if work.startswith("TIES"):
        given = [{"model": path, "parameters": {"density": 0.2, "weight": 0.5}} for path in others]
        own = {"merge_method": "ties", "base_model": base, "parameters": {"normalize": False}}
    else:
        weights = zip(models, (0.7, 0.3), strict=True)
        given = [{"model": path, "parameters": {"weight": weight}} for path, weight in weights]
        own = {"merge_method": "linear"}
    return {**own, "models": given, "dtype": "bfloat16"}


def make_llama(folder: Path, layers: int, vocabulary: int, number: int) -> Path:
    """A folder with the weights of a Llama in shards and its config.json; one that is there is kept."""
    if (folder / "config.json").exists():
        return folder
    layout = {key: ("BF16", shape) for key, shape in llama_shapes(layers, vocabulary).items()}
    with_seeds = enumerate(layout.items())
    writer = Destination(folder, layout, SHARD_BYTES).open({"format": "pt"}, False, None)
    try:
        for seed, (key, (_, shape)) in with_seeds:
            for start in range(0, prod(shape), _CHUNK):
                size = min(_CHUNK, prod(shape) - start)
                values = drawn_values(size, seed * 1000 + start // _CHUNK)
                change = drawn_values(size, (number * 100_003 + seed) * 1000 + start // _CHUNK)
                writer.write(key, start, (values + 0.1 * change if number else values).to(torch.bfloat16))
        writer.commit()
    finally:
        writer.abort()
    (folder / "config.json").write_text(json.dumps(llama_config(layers, vocabulary)))
    return folder


def llama_shapes(layers: int, vocabulary: int = VOCABULARY) -> dict[str, tuple[int, ...]]:
    """The keys and shapes of Llama 3 8B with so many layers."""
    matrices = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEYS_AND_VALUES, HIDDEN),
        "self_attn.v_proj": (KEYS_AND_VALUES, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocabulary, HIDDEN)}


def llama_config(layers: int, vocabulary: int) -> dict[str, object]:
    """The config.json that mergekit and transformers read."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HIDDEN // 128,
        "num_key_value_heads": KEYS_AND_VALUES // 128,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()

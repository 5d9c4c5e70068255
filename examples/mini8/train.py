"""Make the models of mini8: `python -m mecha_exp.examples.mini8.train`.

The base sees a few images of all tasks together; its heads are then frozen. Each expert goes on from the
base on all training images of one task, with the encoder alone. A seed chooses the order of an expert's
images. Its differences from the base are rounded to 8 bits, so that a set of experts takes a megabyte: the
first set is stored beside this file. One machine makes the same bytes every time.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from mecha_exp.system.atomic_write import atomic_write
from mecha_exp.system.cache import cache_folder
from mecha_exp.system.cores import available_cores

from .measured import KINDS, measure
from .network import WIDTH, Encoder, encoder, features
from .storage import pack, unpack
from .tasks import Task, tasks

SEEDS = 5
BATCH_SIZE = 64
BASE_EXAMPLES, BASE_STEPS, BASE_LEARNING_RATE = 80, 60, 1e-3
EXPERT_STEPS, EXPERT_LEARNING_RATE, MOMENTUM, MOST_GRADIENT = 150, 0.025, 0.9, 1.0

HERE = Path(__file__).parent
STORED = {0: HERE / "experts.safetensors"}
"""The sets of experts that need no training, by seed."""
FALLBACK = Path("outputs") / "cache"
"""Where experts lie if the user's cache is off."""

log = logging.getLogger(__name__)
Weights = dict[str, Tensor]


def train_base() -> tuple[Weights, Weights]:
    """The weights of the base's encoder and of the eight heads, after joint training on a few images."""
    torch.manual_seed(0)
    network = Encoder()
    few = {name: task.take(_first_rows(task)) for name, task in tasks()["train"].items()}
    heads = nn.ModuleDict({name: nn.Linear(WIDTH, task.classes) for name, task in few.items()})
    optimizer = torch.optim.AdamW([*network.parameters(), *heads.parameters()], lr=BASE_LEARNING_RATE)
    batches = {name: _batches(task, number) for number, (name, task) in enumerate(few.items())}
    for _ in range(BASE_STEPS):
        optimizer.zero_grad()
        for name, stream in batches.items():
            batch = next(stream)
            torch.autograd.backward(F.cross_entropy(heads[name](network(batch.images)), batch.labels))
        optimizer.step()
    return _weights(network), _weights(heads)


def train_expert(name: str, seed: int) -> Weights:
    """The encoder's differences from the base, as `pack` stores them, after training on one task.

    The task's head stays as it is.
    """
    base = load_file(HERE / "base.safetensors")
    network = encoder({key: tensor.clone() for key, tensor in base.items()})
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    heads = load_file(HERE / "heads.safetensors")
    optimizer = torch.optim.SGD(network.parameters(), lr=EXPERT_LEARNING_RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EXPERT_STEPS)
    stream = _batches(tasks()["train"][name], 1000 * (seed + 1))
    for _ in range(EXPERT_STEPS):
        batch = next(stream)
        optimizer.zero_grad()
        logits = F.linear(network(batch.images), heads[f"{name}.weight"], heads[f"{name}.bias"])
        torch.autograd.backward(F.cross_entropy(logits, batch.labels))
        nn.utils.clip_grad_norm_(network.parameters(), MOST_GRADIENT)
        optimizer.step()
        schedule.step()
    return pack(_weights(network), base)


def make_experts(folder: Path, seeds: Sequence[int]) -> None:
    """Write the experts of these seeds that a folder lacks: those that are stored, then trained ones.

    Training takes all cores, and shows its progress and the time left.

    Args:
        folder: an expert is written to `folder/seed0/digits.safetensors`.
        seeds: from 0.
    """
    missing = [
        (name, seed, path)
        for seed in seeds
        for name in tasks()["train"]
        if not (path := folder / f"seed{seed}" / f"{name}.safetensors").exists()
    ]
    for name, seed, path in missing:
        if seed in STORED:
            _write_expert(_stored_expert(name, seed), path)
    missing = [expert for expert in missing if expert[1] not in STORED]
    if not missing:
        return
    log.info("mini8: training %d experts into %s, once on this machine", len(missing), folder)
    spawn = multiprocessing.get_context("spawn")
    with (
        _Bar(len(missing)) as advance,
        ProcessPoolExecutor(min(available_cores(), len(missing)), spawn, _use_one_thread) as pool,
    ):
        try:
            for future in as_completed([pool.submit(_train_and_write, *expert) for expert in missing]):
                future.result()
                advance()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def model_file(name: str) -> Path:
    """A file of mini8 by its name, made first if this machine has not made it yet.

    Args:
        name: `base.safetensors`; `seed0/digits.safetensors` for the expert of a seed and a task, with which
            all eight experts of the seed are trained; `seed0/digits.statistics.safetensors` or
            `seed0/digits.mask.safetensors` for what merges with data read beside it.

    Raises:
        FileNotFoundError: mini8 has no such file.
    """
    if (HERE / name).is_file():
        return HERE / name
    seed, _, file = name.partition("/")
    task, _, kind = file.removesuffix(".safetensors").partition(".")
    number = seed.removeprefix("seed")
    is_known = task in tasks()["train"] and kind in ("", *KINDS)
    if not seed.startswith("seed") or not number.isdecimal() or not is_known:
        raise FileNotFoundError(
            "mini8 has base.safetensors, seed0/TASK.safetensors and seed0/TASK.statistics.safetensors or "
            f"seed0/TASK.mask.safetensors; {name} is neither"
        )
    path = _experts_folder() / name
    if not path.exists() and kind:
        measure(kind, int(number), task, path)
    elif not path.exists():
        make_experts(_experts_folder(), [int(number)])
    return path


def accuracies(state_dict: Mapping[str, Tensor], split: str) -> dict[str, float]:
    """The fraction of each task's images that are classified rightly."""
    heads, right = load_file(HERE / "heads.safetensors"), {}
    for name, task in tasks()[split].items():
        logits = F.linear(features(state_dict, task.images), heads[f"{name}.weight"], heads[f"{name}.bias"])
        right[name] = float((logits.argmax(1) == task.labels).double().mean())
    return right


@lru_cache(maxsize=1)
def _experts_folder() -> Path:
    """The folder of trained experts, which depends on all that decides their bytes."""
    decisive = [*HERE.glob("*.py"), *HERE.glob("*.safetensors")]
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(decisive):
        digest.update(path.read_bytes())
    return (cache_folder() or FALLBACK) / "mini8" / digest.hexdigest()[:12]


def _stored_expert(name: str, seed: int) -> Weights:
    """The differences of one expert of a set that is stored beside this file."""
    start = f"{name}/"
    stored = load_file(STORED[seed])
    return {key.removeprefix(start): tensor for key, tensor in stored.items() if key.startswith(start)}


def _train_and_write(name: str, seed: int, path: Path) -> None:
    _write_expert(train_expert(name, seed), path)


def _write_expert(packed: Weights, path: Path) -> None:
    """Write the weights of an expert atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        save_file(unpack(packed, load_file(HERE / "base.safetensors")), temporary)


def _use_one_thread() -> None:
    """Let a process compute on one thread: sums then do not depend on the machine's cores."""
    torch.set_num_threads(1)


class _Bar:
    """A progress bar on stderr, where that is a terminal."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("training experts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self) -> None:
        self._progress.advance(self._task)


def _first_rows(task: Task) -> Tensor:
    """The rows of the few examples that the base is trained on, at random."""
    return torch.randperm(len(task.labels), generator=torch.Generator().manual_seed(5))[:BASE_EXAMPLES]


def _batches(task: Task, seed: int) -> Iterator[Task]:
    """Batches without end, each pass over the task in another order."""
    random = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(task.labels), generator=random)
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            yield task.take(order[start : start + BATCH_SIZE])


def _weights(module: nn.Module) -> Weights:
    return {key: tensor.detach().float().clone() for key, tensor in module.state_dict().items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and make the base and the heads, or experts."""
    parser = argparse.ArgumentParser(description="Train the base and the heads of mini8, or its experts.")
    parser.add_argument("--base", action="store_true", help="write the base and the heads beside this file")
    parser.add_argument("--first-set", action="store_true", help="write the experts beside this file")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(SEEDS)), help="of the experts")
    parser.add_argument("--output", type=Path, default=None, help="folder of experts (default: the cache)")
    options = parser.parse_args(arguments)

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.base:
        _use_one_thread()
        base, heads = train_base()
        save_file(base, HERE / "base.safetensors")
        save_file(heads, HERE / "heads.safetensors")
        log.info("base: %s", {name: f"{value:.3f}" for name, value in accuracies(base, "validation").items()})
    elif options.first_set:
        _use_one_thread()
        experts = {name: train_expert(name, 0) for name in tasks()["train"]}
        packed = {f"{name}/{key}": t for name, expert in experts.items() for key, t in expert.items()}
        save_file(packed, STORED[0])
    else:
        make_experts(options.output or _experts_folder(), options.seeds)


if __name__ == "__main__":
    main()

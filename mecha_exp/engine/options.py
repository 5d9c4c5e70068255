"""How a merge is run: the arithmetic, the tiles, the workers, and what is an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from mecha_exp.checkpoint import parse_dtype
from mecha_exp.engine.devices import CPU, check_device, default_tile, default_workers
from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.numbers import is_whole

ON_MISSING = ("error", "skip", "base")
ON_EXTRA = ("skip", "error", "keep")
ON_NONFINITE = ("error", "keep", "skip")
ON_TIED = ("error", "untie", "tie")
ON_QUANTISED = ("error", "dequantise")
ON_INTEGERS = ("error", "base")
ON_TOKENS = ("error", "merge")
ON_CHANNELS = ("error", "base")
ON_PREFIX = ("error", "match")
RESIZE_EMBEDDINGS = ("error", "truncate", "pad")
RUNNING_STATS = ("auto", "base", "pool", "merge")
STACKED_EXPERTS = ("auto", "split", "whole")
PROCESSES, RAY, SLURM, REHEARSAL = "processes", "ray", "slurm", "slurm-local"
CLUSTERS = (PROCESSES, RAY, SLURM, REHEARSAL)
AUTO = "auto"
SETTINGS = (
    "device",
    "compute_dtype",
    "on_missing",
    "on_extra",
    "on_nonfinite",
    "on_tied",
    "on_quantised",
    "on_integers",
    "on_tokens",
    "on_prefix",
    "on_channels",
    "resize_embeddings",
    "running_stats",
    "stacked_experts",
)
"""The options that can change what a merge gives; the others change only how fast it is made."""

FUSE = ("auto", "always", "never")
_CHOICES = {
    "on_missing": ON_MISSING,
    "on_extra": ON_EXTRA,
    "on_nonfinite": ON_NONFINITE,
    "on_tied": ON_TIED,
    "on_quantised": ON_QUANTISED,
    "on_integers": ON_INTEGERS,
    "on_tokens": ON_TOKENS,
    "on_prefix": ON_PREFIX,
    "on_channels": ON_CHANNELS,
    "running_stats": RUNNING_STATS,
    "stacked_experts": STACKED_EXPERTS,
    "resize_embeddings": RESIZE_EMBEDDINGS,
    "fuse": FUSE,
}


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the engine. Only those in `SETTINGS` can change the result.

    Attributes:
        compute_dtype: the arithmetic, float32 or float64; `auto` is float64 at keys that are float64 in an
            input, and float32 at all others.
        device: where the arithmetic is done: cpu, cuda or cuda:1 and so on; see `devices`.
        workers: threads; None is one for each core; on a GPU four to eight.
        fuse: whether passes are compiled into loops: `auto` where that takes less time than it saves,
            `always` or `never`. The bytes are the same.
        tile_size: elements that pass through an elementwise chain at a time; None is 524,288, and on a GPU
            as many as its memory is large for, see `tile_elements`.
        memory_budget: bytes that the tensors of whole-tensor methods may take at once, with those that
            methods read of other keys. A key for which these alone exceed it is made while no other is.
        on_missing: a key that one of the inputs lacks is an error, or left out of the output (`skip`), or
            taken unchanged from the first input that has it (`base`). Where it is an error, parts that an
            input lacks as a whole (see `MissingKeys`) are taken unchanged nevertheless.
        on_extra: keys of an input that are not in its model config are left out of the output with a warning
            (`skip`), or an error, or merged like the others (`keep`). A model of no known config has none,
            one that was found to be of a family (llama-hf and so on) has some only for `error`.
        on_nonfinite: a NaN or an infinity in an input is an error, or kept, or makes the key count as
            missing from that input (`skip`), which takes a look at all inputs before.
        on_tied: an output layer that an input lacks because it is the embedding is an error, or read from
            there (`untie`), or left out of the output (`tie`).
        on_quantised: an input that is stored as codes is an error, or read as the numbers that the codes
            stand for (`dequantise`), which are float32 and count as such.
        on_integers: a key of integers or booleans that differs between the inputs, and that is not a counter
            or a table of positions, is an error, or taken from the first input (`base`).
        on_tokens: tokens that differ between the tokenizers beside the inputs are an error, or the rows of
            different tokens are merged (`merge`).
        on_prefix: keys of an input that are those of the first one but for their prefixes are an error, or
            read under the names that they have there (`match`); see `prefixes_between`.
        on_channels: first layers of image models that take other numbers of channels, as those of inpainting
            models, are an error, or merged on the channels that the first input has (`base`): those that
            another one lacks are the first input's.
        running_stats: the running means and variances of normalisation layers are those of the first input
            (`base`), or pooled over the inputs (`pool`), or merged like weights (`merge`); `auto` pools
            for means of models, and takes the first input's for methods of differences. See
            `running_statistics`.
        stacked_experts: a key that holds several experts of a mixture is merged expert by expert. `auto` does
            so where a model config marks the key or transformers names one so, and what only looks like it
            is an error where it matters; `split` does it there too, `whole` nowhere.
        resize_embeddings: vocabularies of different sizes are an error, or cut to the smallest (`truncate`),
            or filled up to the largest (`pad`) with the rows of the first input that has them.
        strict: a value that overflows the output's dtype is an error rather than a warning, and so are keys
            in no block where hyperparameters go by blocks.
        across: how many tasks make the files of one output folder, in processes or on machines of their own;
            None makes it in this process. See `mecha_exp.across`.
        task: the one of these tasks, from 1, that this process makes; None makes all, and commits them.
        cluster: where the tasks run: `processes` of this machine, `ray` on this machine, or at an address
            (`ray://host:10001`, `host:6379`), `slurm`, or `slurm-local`, its rehearsal on this machine.
        model_dirs: folders where a relative path of a model is looked for, after the current one.
    """

    compute_dtype: torch.dtype | str = AUTO
    device: str = CPU
    workers: int | None = None
    fuse: str = "auto"
    tile_size: int | None = None
    memory_budget: int = 2 << 30
    on_missing: str = "error"
    on_extra: str = "skip"
    on_nonfinite: str = "error"
    on_tied: str = "error"
    on_quantised: str = "error"
    on_integers: str = "error"
    on_tokens: str = "error"
    on_prefix: str = "error"
    on_channels: str = "error"
    running_stats: str = AUTO
    stacked_experts: str = AUTO
    resize_embeddings: str = "error"
    strict: bool = False
    across: int | None = None
    task: int | None = None
    cluster: str = PROCESSES
    model_dirs: Sequence[Path] = ()

    def __post_init__(self) -> None:
        if isinstance(self.compute_dtype, str) and self.compute_dtype != AUTO:
            object.__setattr__(self, "compute_dtype", parse_dtype(self.compute_dtype))
        if self.compute_dtype not in (AUTO, torch.float32, torch.float64):
            raise ConfigError(f"compute_dtype: expected auto, float32 or float64, got {self.compute_dtype}")
        check_device(self.device)
        _require_positive("memory_budget", self.memory_budget)
        for name in ("workers", "across", "task", "tile_size"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if self.task is not None and self.task > (self.across or 0):
            of = f"across={self.across}" if self.across else "across, which is not set"
            raise ConfigError(f"task={self.task}: expected the number of a task from 1 to {of}")
        if self.cluster not in CLUSTERS and ":" not in str(self.cluster):
            raise ConfigError(
                f"cluster: expected {', '.join(CLUSTERS)}, or an address of Ray such as ray://host:10001, "
                f"got '{self.cluster}'.{did_you_mean(str(self.cluster), CLUSTERS)}"
            )
        for name, known in _CHOICES.items():
            choice = getattr(self, name)
            if choice not in known:
                raise ConfigError(f"{name}: unknown choice '{choice}'.{did_you_mean(choice, known)}")

    def arithmetic(self, dtypes: Iterable[str]) -> torch.dtype:
        """The dtype of the arithmetic on inputs of these dtypes, by their safetensors names."""
        if isinstance(self.compute_dtype, torch.dtype):
            return self.compute_dtype
        return torch.float64 if "F64" in dtypes else torch.float32

    @property
    def threads(self) -> int:
        """How many workers run."""
        return self.workers or default_workers(self.device)

    @cached_property
    def tile_elements(self) -> int:
        """How many elements a tile has."""
        return self.tile_size or default_tile(self.device)


def _require_positive(name: str, value: object) -> None:
    if not is_whole(value, least=1):
        raise ConfigError(f"{name}: expected a positive whole number, got {value!r}")

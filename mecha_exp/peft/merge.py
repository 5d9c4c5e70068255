"""Merges adapters of PEFT with each other into one adapter: sums of differences, without the base."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mecha_exp.architectures.lora import PEFT_PREFIX
from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import CheckpointError, ConfigError, Problems, some
from mecha_exp.numbers import is_whole
from mecha_exp.peft.config import LORA, PeftConfig, config_of
from mecha_exp.peft.modules import OF_COLUMNS, OF_ROWS, A, B, sorted_modules
from mecha_exp.peft.sums import Sum, Term
from mecha_exp.peft.writer import config_of_ranks, require_adapter_folder, write_adapter
from mecha_exp.sources.search import find_model
from mecha_exp.sources.source import Source

_OWN = {"peft_type", "base_model_name_or_path", "task_type", "fan_in_fan_out", "inference_mode", "bias"}
"""The entries of a configuration that the merged adapter has from the first one."""


@dataclass(frozen=True)
class MergedAdapter:
    """A merged adapter, as it was written.

    Attributes:
        path: its folder.
        ranks: of each module, by its name.
        errors: the relative error that the rank costs each module, the Frobenius norm of the difference over
            that of the exact sum; 0 where factors are concatenated.
        error: the same over all modules together.
        error_at: what the error would be at other ranks.
        bases: the bases that the adapters name, by adapter_config.json. More than one may be one model in
            several places; where they are different models, the sum means nothing.
    """

    path: Path
    ranks: Mapping[str, int]
    errors: Mapping[str, float]
    error: float
    error_at: Mapping[int, float]
    bases: tuple[str, ...] = ()


def merge_adapters(
    adapters: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    weights: float | Sequence[float] = 1.0,
    rank: int | None = None,
    *,
    model_dirs: Sequence[str | os.PathLike[str]] = (),
) -> MergedAdapter:
    """Merge adapters of PEFT into one: at each module the sum of w_i s_i B_i A_i, written as an adapter.

    It is the sum of what the adapters add to their base, for weights of either sign, and not a sum of their
    factors. Without a rank the factors are concatenated, which costs no error and adds up the ranks. With one
    it is the nearest adapter of that rank (Eckart & Young 1936), and the error is reported; the decomposition
    is that of a small matrix between the factors, in float64, so that it takes seconds.

    Args:
        adapters: their folders, or names on the hub.
        output: the folder to write: adapter_config.json and adapter_model.safetensors, in float32.
        weights: one for all, or one for each.
        rank: of each module, or less where the sum has less; None concatenates.
        model_dirs: where the adapters are looked for, after the current folder.

    Raises:
        ConfigError: numbers of weights and adapters that differ, or a rank below 1.
        CheckpointError: an adapter that is not one, or that is more than products of factors: DoRA, biases
            and whole tensors depend on the base; factors that are not finite, or are too large for float32
            in the result; or a folder that holds something else.

    >>> merge_adapters(["math", "code"], "both", weights=[1.0, -0.3], rank=16).error
    0.083
    """
    folders = [Path(folder) for folder in model_dirs]
    each = [float(weights)] * len(adapters) if isinstance(weights, int | float) else list(map(float, weights))
    _check(adapters, each, rank, Path(output))
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_stored(find_model(os.fspath(adapter), folders))) for adapter in adapters
        ]
        parts = _Parts.of(opened)
        sums = {module: parts.sum_of(module, each) for module in parts.modules}
        tensors = {
            key: tensor
            for module in parts.modules
            for key, tensor in parts.written(module, sums[module], rank)
        }
    if infinite := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(f"{output}: {some(infinite, 3)} would be too large for float32.")
    ranks = {module: tensors[parts.key(module, 0)].shape[0] for module in parts.modules}
    config = {**parts.shared_config(), **config_of_ranks(ranks)}
    write_adapter(Path(output), tensors, config)
    total = math.fsum(sum_.squared_norm for sum_ in sums.values())
    errors = {
        module: math.sqrt(sum_.squared_error(rank) / sum_.squared_norm) if sum_.squared_norm else 0.0
        for module, sum_ in sums.items()
    }
    at_rank, at_others = _error(sums, rank, total), _errors_at(sums, total)
    return MergedAdapter(Path(output), ranks, errors, at_rank, at_others, parts.bases)


def _check(adapters: Sequence[Any], weights: Sequence[float], rank: int | None, output: Path) -> None:
    if not adapters:
        raise ConfigError("merge_adapters: name one adapter at least.")
    if len(weights) != len(adapters):
        raise ConfigError(
            f"weights: {len(weights)} are given for {len(adapters)} adapters. Give one number, or one each."
        )
    if not all(map(math.isfinite, weights)):
        raise ConfigError(f"weights: expected finite numbers, got {some(map(str, weights))}.")
    if rank is not None and not is_whole(rank, least=1):
        raise ConfigError(f"rank: expected a whole number of at least 1, or none, got {rank!r}.")
    require_adapter_folder(output)


@dataclass(frozen=True)
class _Parts:
    """The factors of several adapters by module.

    Attributes:
        sources: the opened adapters.
        configs: their configurations.
        factors: of each adapter the keys by module and suffix.
    """

    sources: Sequence[Source]
    configs: Sequence[PeftConfig]
    factors: Sequence[Mapping[str, Mapping[str, str]]]

    @staticmethod
    def of(sources: Sequence[Source]) -> _Parts:
        """Read the headers of adapters, or raise one CheckpointError with all that is wrong."""
        problems = Problems()
        configs, factors = [], []
        for source in sources:
            config = config_of(source)
            if config is None:
                problems.add(f"{source.name} is not the folder of an adapter: it has no adapter_config.json.")
                continue
            if config.kind != LORA:
                problems.add(
                    f"{source.name}: a sum of {config.kind} adapters has no factors of that form. Merge the "
                    "models that they stand for: models.experts=[ADAPTER,...]."
                )
                continue
            own, whole = sorted_modules(source.keys(), source.name)
            other = [f"{name}.{s}" for name, suffixes in own.items() for s in suffixes if s not in _PAIRS]
            if beyond := [*other, *whole]:
                problems.add(
                    f"{source.name}: {some(beyond, 3)} depend on the base, so that no sum of factors has "
                    "what they do. Merge the models that they stand for: models.experts=[ADAPTER,...]."
                )
            configs.append(config)
            factors.append(own)
        problems.raise_as(CheckpointError)
        parts = _Parts(sources, configs, factors)
        parts._check_shapes()
        return parts

    @property
    def bases(self) -> tuple[str, ...]:
        """The bases that the adapters name, each once."""
        return tuple(dict.fromkeys(config.base for config in self.configs if config.base))

    @property
    def modules(self) -> list[str]:
        """The modules that any of the adapters changes."""
        return list(dict.fromkeys(module for own in self.factors for module in own))

    def suffixes(self, module: str) -> tuple[str, str]:
        """The names of the factors of a module: those of a layer, or of an embedding."""
        names = next(own[module] for own in self.factors if module in own)
        return (OF_ROWS, OF_COLUMNS) if OF_ROWS in names else (A, B)

    def key(self, module: str, number: int) -> str:
        """The key of a factor of the merged adapter: 0 is A, 1 is B."""
        return f"{PEFT_PREFIX}{module}.{self.suffixes(module)[number]}"

    def sum_of(self, module: str, weights: Sequence[float]) -> Sum:
        """The weighted sum of what the adapters add at a module."""
        terms = []
        for source, config, own, weight in zip(
            self.sources, self.configs, self.factors, weights, strict=True
        ):
            if module in own:
                down, up = (_finite(source, own[module][suffix]) for suffix in self.suffixes(module))
                scale = weight * config.scale_of(module)
                if not math.isfinite(scale * float(up.abs().max()) if up.numel() else scale):
                    raise CheckpointError(f"{source.name}: the scale {scale:g} of {module} is too large.")
                terms.append(Term(scale, down.flatten(1), up.flatten(1)))
        return Sum(terms)

    def written(self, module: str, sum_: Sum, rank: int | None) -> Iterator[tuple[str, Tensor]]:
        """The factors of a module of the merged adapter, with their keys."""
        factors = sum_.concatenated() if rank is None or rank >= sum_.rank else sum_.nearest(rank)
        source, own = next(
            (s, names) for s, names in zip(self.sources, self.factors, strict=True) if module in names
        )
        for number, (suffix, factor) in enumerate(zip(self.suffixes(module), factors, strict=True)):
            kernel = source.info(own[module][suffix]).shape[2:]
            shape = (factor.shape[0], -1, *kernel) if number == 0 else (*factor.shape, *kernel)
            yield self.key(module, number), factor.reshape(shape).to(torch.float32).contiguous()

    def shared_config(self) -> dict[str, Any]:
        """What the configuration of the merged adapter has from the others."""
        first = self.configs[0].content
        merged = {name: value for name, value in first.items() if name in _OWN}
        merged["fan_in_fan_out"] = any(config.fan_in_fan_out for config in self.configs)
        return merged

    def _check_shapes(self) -> None:
        problems = Problems()
        for module in self.modules:
            shapes: dict[tuple[Any, ...], str] = {}
            for source, config, own in zip(self.sources, self.configs, self.factors, strict=True):
                if module not in own:
                    continue
                if own[module].keys() != {*self.suffixes(module)}:
                    problems.add(f"{source.name}: {module} is an embedding here, and a layer elsewhere.")
                    continue
                down, up = (source.info(own[module][suffix]).shape for suffix in self.suffixes(module))
                if {down[0], up[1]} != {config.rank_of(module)}:
                    problems.add(
                        f"{source.name}: its configuration says rank {config.rank_of(module)} for {module}, "
                        f"and its factors are {list(down)} and {list(up)}."
                    )
                shapes.setdefault((down[1:], up[:1], up[2:]), source.name)
            if len(shapes) > 1:
                problems.add(
                    f"{module} has other sizes in {' than in '.join(shapes.values())}: these adapters are "
                    "for different bases."
                )
        problems.raise_as(CheckpointError)


def _finite(source: Source, key: str) -> Tensor:
    factor = source.read(key)
    if not factor.isfinite().all():
        raise CheckpointError(f"{source.name}: {key} has values that are not finite (NaN or infinite).")
    return factor


_PAIRS = (A, B, OF_ROWS, OF_COLUMNS)


def _error(sums: Mapping[str, Sum], rank: int | None, total: float) -> float:
    return math.sqrt(math.fsum(sum_.squared_error(rank) for sum_ in sums.values()) / total) if total else 0.0


def _errors_at(sums: Mapping[str, Sum], total: float) -> dict[int, float]:
    """The error at each power of two below the largest rank."""
    largest = max(sum_.rank for sum_ in sums.values())
    return {1 << n: _error(sums, 1 << n, total) for n in range(largest.bit_length()) if 1 << n < largest}

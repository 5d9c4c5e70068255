"""Extracts an adapter from a fine-tuned model: what it adds to its base, at a rank, by SVD."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mecha_exp.architectures.lora import PEFT_PREFIX
from mecha_exp.checkpoint import is_arithmetic, open_stored
from mecha_exp.checkpoint.sidecars import config_beside
from mecha_exp.errors import CheckpointError, ConfigError, Problems, counted, some
from mecha_exp.families import is_causal_model, is_embedding, is_table
from mecha_exp.graph.nodes import InMemory
from mecha_exp.numbers import is_whole
from mecha_exp.peft.deltas import is_tied
from mecha_exp.peft.modules import CONV1D, A, B
from mecha_exp.peft.writer import config_of_ranks, require_adapter_folder, write_adapter
from mecha_exp.sources.memory import MemorySource
from mecha_exp.sources.quantised.view import require_plain
from mecha_exp.sources.search import find_model
from mecha_exp.sources.source import Source

_WEIGHT = ".weight"
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""The model types with `Conv1D` of transformers, stored as (inputs, outputs)."""


@dataclass(frozen=True)
class ExtractedAdapter:
    """An extracted adapter, as it was written.

    Attributes:
        path: its folder.
        ranks: of each module that changed, by its name.
        errors: the relative error of each module: the Frobenius norm of what the rank leaves out, over that
            of the difference.
        error: the same over all modules together.
        whole: the keys of the tensors that are saved whole.
        left_out: the keys of tensors that changed and were left out.
    """

    path: Path
    ranks: Mapping[str, int]
    errors: Mapping[str, float]
    error: float
    whole: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def extract_adapter(
    fine: str | os.PathLike[str] | Mapping[str, Tensor],
    base: str | os.PathLike[str],
    output: str | os.PathLike[str],
    rank: int = 16,
    *,
    modules_to_save: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    model_dirs: Sequence[str | os.PathLike[str]] = (),
) -> ExtractedAdapter:
    """Extract an adapter of PEFT: at each linear layer the B A that is nearest to W_fine - W_base.

    With U S V^T the singular value decomposition of a difference, B = U_r sqrt(S_r) and A = sqrt(S_r) V_r^T,
    the nearest product of that rank (Eckart & Young 1936), in float32. A module has a lower rank where its
    difference has. The models are read key by key; only the factors are held.

    Args:
        fine, base: the models: files, folders, or names on the hub; the first may be a state dict.
        output: the folder to write: adapter_config.json and adapter_model.safetensors, in float32.
        rank: the largest of a module.
        modules_to_save: the ends of names of modules that are saved whole, such as `embed_tokens` or `norm`.
        leave_out: patterns of keys whose changes are left out, such as `*.bias`.
        model_dirs: where the models are looked for, after the current folder.

    Raises:
        ConfigError: a rank below 1.
        CheckpointError: the models have other keys or shapes, or are quantised; something else changed than
            linear layers, and it is not said what to do with it; an embedding that is the output layer, too;
            nothing changed; values that are not finite; or a folder that holds something else.

    Source: LoRA extraction as in kohya's sd-scripts and mergekit's `extract_lora`; PEFT for the names.

    >>> extracted = extract_adapter("fine-tuned", "base", "adapter", rank=16)
    >>> print(extracted.error)  # 0 where no difference has a higher rank
    """
    require_rank(rank)
    require_adapter_folder(Path(output))
    folders = [Path(folder) for folder in model_dirs]
    path = find_model(os.fspath(base), folders)
    with _opened(fine, folders) as changed, open_stored(path) as before:
        plain = require_plain({"fine": changed, "base": before}, "error")
        pair = _Pair(plain["fine"], plain["base"], tuple(modules_to_save), tuple(leave_out))
        pair.check()
        return _written(pair, Path(output), rank, os.fspath(base))


def require_rank(rank: Any, name: str = "rank") -> None:
    """Raise ConfigError for what is not a rank; the name stands in the message."""
    if not is_whole(rank, least=1):
        raise ConfigError(f"{name}: expected a whole number of at least 1, got {rank!r}.")


def _opened(model: str | os.PathLike[str] | Mapping[str, Tensor], folders: Sequence[Path]) -> Source:
    if isinstance(model, Mapping):
        return MemorySource(InMemory(model, "the model"))
    return open_stored(find_model(os.fspath(model), folders))


def _written(pair: _Pair, output: Path, rank: int, base: str) -> ExtractedAdapter:
    """Decompose the differences, and write the adapter."""
    tensors = {f"{PEFT_PREFIX}{key}": _read(pair.fine, key).contiguous() for key in pair.whole}
    ranks: dict[str, int] = {}
    lost: dict[str, tuple[float, float]] = {}
    for module, difference in pair.differences():
        factors, squared_error, squared_norm = _factors(difference, rank)
        for suffix, factor in zip((A, B), factors, strict=True):
            tensors[f"{PEFT_PREFIX}{module}.{suffix}"] = factor.contiguous()
        ranks[module], lost[module] = factors[0].shape[0], (squared_error, squared_norm)
    if not ranks:
        raise CheckpointError(f"no linear layer of {pair.fine.name} differs from {pair.base.name}.")
    write_adapter(output, tensors, {**_config(pair, base), **config_of_ranks(ranks)})
    errors = {module: math.sqrt(error / norm) for module, (error, norm) in lost.items()}
    total = math.fsum(error for error, _ in lost.values()) / math.fsum(norm for _, norm in lost.values())
    return ExtractedAdapter(output, ranks, errors, math.sqrt(total), pair.whole, pair.left_out)


@dataclass(frozen=True)
class _Pair:
    """A fine-tuned model and its base."""

    fine: Source
    base: Source
    modules_to_save: tuple[str, ...]
    leave_out: tuple[str, ...]

    def check(self) -> None:
        """Raise CheckpointError for what an adapter of linear layers cannot have."""
        problems = Problems()
        if other := sorted({*self.fine.keys()} ^ {*self.base.keys()}):
            problems.add(
                f"{self.fine.name} and {self.base.name} do not have the same keys: {some(other, 3)}. An "
                "adapter changes tensors, and adds none."
            )
        if shapes := [key for key in self._shared if self._is_resized(key) and key not in self._decided]:
            have = "has another shape" if len(shapes) == 1 else "have other shapes"
            problems.add(
                f"{some(shapes, 3)} {have} in {self.fine.name} than in {self.base.name}. {_cure(shapes[0])}"
            )
        problems.raise_as(CheckpointError)
        self._check_ties()
        if others := [key for key in self._other_changes if key not in self._decided]:
            raise CheckpointError(
                f"besides linear layers {counted(len(others), 'tensor')} changed: {some(others, 5)}. "
                f"{_cure(others[0])}"
            )

    def _check_ties(self) -> None:
        """Refuse an embedding whose output layer PEFT would leave as it was."""
        tied = [key for key in self.whole if is_embedding(key) and self._changed(key)]
        if tied and is_tied(self.base):
            raise CheckpointError(
                f"{self.base.name} uses {tied[0]} as its output layer, too (it is tied): PEFT would leave "
                f"that as it was. Leave the change out (--leave-out '{tied[0]}') and do not save the module, "
                "or write both models with an output layer of their own."
            )

    @cached_property
    def whole(self) -> tuple[str, ...]:
        """The keys of the modules that are saved whole."""
        ends = self.modules_to_save
        return tuple(key for key in self._shared if ends and self._module(key).endswith(ends))

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """The keys whose changes are left out, of modules that are not saved whole."""
        return tuple(
            key
            for key in self._shared
            if key not in self.whole
            and any(fnmatchcase(key, pattern) for pattern in self.leave_out)
            and self._changed(key)
        )

    @cached_property
    def _decided(self) -> set[str]:
        """The keys for which it is said what to do with their change."""
        return {*self.whole, *self.left_out}

    def _is_resized(self, key: str) -> bool:
        return self.fine.info(key).shape != self.base.info(key).shape

    @property
    def has_transposed(self) -> bool:
        """Whether there are linear layers that are stored as (inputs, outputs)."""
        return self._config_of_base.get("model_type") in _TRANSPOSED

    def differences(self) -> Iterator[tuple[str, Tensor]]:
        """The differences of the linear layers that changed, as [outputs, inputs], by module."""
        for key in self._shared:
            if self._is_linear(key) and key not in self._decided:
                difference = _read(self.fine, key).float() - _read(self.base, key).float()
                if difference.any():
                    module = self._module(key)
                    is_transposed = self.has_transposed and module.endswith(CONV1D)
                    yield module, difference.mT if is_transposed else difference

    def task_type(self) -> str | None:
        """The task that PEFT is told, where the architecture tells it."""
        return "CAUSAL_LM" if is_causal_model(self._config_of_base) else None

    @cached_property
    def _shared(self) -> list[str]:
        return [key for key in self.fine.keys() if key in self.base]

    @cached_property
    def _other_changes(self) -> list[str]:
        """The keys that changed and are not linear layers."""
        return [key for key in self._shared if not self._is_linear(key) and self._changed(key)]

    @cached_property
    def _config_of_base(self) -> Mapping[str, Any]:
        return config_beside(self.base.path)

    def _is_linear(self, key: str) -> bool:
        info = self.fine.info(key)
        is_matrix = key.endswith(_WEIGHT) and len(info.shape) == 2 and is_arithmetic(info.dtype)
        return is_matrix and not is_table(key)

    def _changed(self, key: str) -> bool:
        if self._is_resized(key):
            return True
        fine, base = self.fine.read(key), self.base.read(key)
        common = torch.promote_types(fine.dtype, base.dtype)
        return not torch.equal(fine.to(common), base.to(common))

    @staticmethod
    def _module(key: str) -> str:
        return key.rpartition(".")[0]


def _cure(key: str) -> str:
    """What to do with a tensor that an adapter of linear layers cannot have."""
    name = key.rpartition(".")[0].rpartition(".")[2]
    return (
        f"Save their modules whole (--modules-to-save {name}), or leave the changes out (--leave-out "
        f"'{key}'). Both take several."
    )


def _read(model: Source, key: str) -> Tensor:
    tensor = model.read(key)
    if not tensor.float().isfinite().all():
        raise CheckpointError(f"{model.name}: {key} has values that are not finite (NaN or infinite).")
    return tensor


def _factors(difference: Tensor, rank: int) -> tuple[tuple[Tensor, Tensor], float, float]:
    """A and B of the nearest product of a rank, the squared norm of what it leaves out, and that of all."""
    u, s, vh = torch.linalg.svd(difference, full_matrices=False)
    noise = s[0] * max(difference.shape) * torch.finfo(s.dtype).eps
    count = min(rank, int((s > noise).sum()))
    root = s[:count].sqrt()
    squares = s.double().square()
    factors = root[:, None] * vh[:count], u[:, :count] * root
    return factors, float(squares[count:].sum()), float(squares.sum())


def _config(pair: _Pair, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "task_type": pair.task_type(),
        "fan_in_fan_out": pair.has_transposed,
        "inference_mode": True,
        "bias": "none",
        "modules_to_save": list(pair.modules_to_save) or None,
    }

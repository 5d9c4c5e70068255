"""A PEFT adapter read as the differences that it makes to the tensors of its base."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mecha_exp.checkpoint import is_arithmetic
from mecha_exp.checkpoint.sidecars import config_beside
from mecha_exp.errors import CheckpointError
from mecha_exp.families import is_embedding, is_language_model, is_output, is_shared, output_layers
from mecha_exp.peft.config import config_of
from mecha_exp.peft.modules import TOKENS, A
from mecha_exp.peft.targets import Matching
from mecha_exp.sources.lora import DeltaSource, dtype_of, require_numbers
from mecha_exp.sources.source import Source, infos_of


class PeftDeltas(DeltaSource):
    """The differences that a PEFT adapter makes to a model, in the names of the model's state dict.

    Attributes:
        config: of the adapter.
        modules: by key of the model what changes it, in the order of the model.

    Args:
        adapter: its opened folder.
        base: the model. Its tensors are read for DoRA and for whole tensors of the adapter.
        budget: the largest size of the cache in bytes.

    Raises:
        CheckpointError: everything that cannot be read exactly; see `mecha_exp.peft.config` and `modules`.
    """

    def __init__(self, adapter: Source, base: Source, budget: int) -> None:
        config = config_of(adapter)
        if config is None:
            raise CheckpointError(
                f"{adapter.name} has no adapter_config.json: name the folder of the adapter."
            )
        self.config = config
        self._infos, self._base, self._targets = infos_of(adapter), base, infos_of(base)
        require_numbers(adapter.name, self._infos)
        self.modules = Matching(adapter.name, config, self._infos, base.name, self._targets).modules()
        _check_ties(adapter.name, self, base)
        super().__init__(adapter, dtype_of(self._infos, self._targets), self.modules, budget)
        self._depend_on(base)

    def all_keys(self) -> Collection[str]:
        return [key for key, info in self._targets.items() if is_arithmetic(info.dtype)]

    def __contains__(self, key: object) -> bool:
        info = self._targets.get(key) if isinstance(key, str) else None
        return info is not None and is_arithmetic(info.dtype)

    def has_head(self, suffix: str) -> bool:
        """Whether the adapter has a tensor of this suffix for an output layer."""
        modules = (key.removesuffix(f".{suffix}") for key in self._infos if key.endswith(f".{suffix}"))
        return any(is_output(f"{module}.weight") for module in modules)

    def _shape(self, key: str) -> tuple[int, ...]:
        return self._targets[key].shape

    def _delta(self, key: str) -> torch.Tensor:
        delta = self.modules[key].delta(self._read, lambda name: self._base.read(name).to(self._dtype))
        return delta.reshape(self._shape(key))


def is_tied(model: Source) -> bool:
    """Whether a model uses its embedding as its output layer, by its keys and the config.json beside it.

    A config without `tie_word_embeddings` leaves it true, as transformers reads it.
    """
    content = config_beside(model.path)
    has_head = bool(output_layers({key: info.shape for key, info in infos_of(model).items()}))
    may_tie = content.get("tie_word_embeddings", True) and is_language_model(content)
    return may_tie and not has_head


def _check_ties(name: str, adapter: PeftDeltas, base: Source) -> None:
    """Refuse to change an embedding that its model uses as other tables, too, which PEFT left as they were.

    With `ensure_weight_tying` PEFT gives the output layer the same adapter. It does so for most models, and
    for GPT-2 it does not: the adapter's file tells.
    """
    for key, module in adapter.modules.items():
        is_whole = adapter.config.saves(key.removesuffix(".weight"))
        if not is_embedding(key) or not (module.factors.keys() - {TOKENS} or is_whole):
            continue
        if adapter.config.ties_embeddings and adapter.has_head(A if module.factors else "weight"):
            continue
        if module.whole and is_shared(key):
            raise CheckpointError(
                f"{name}: PEFT trained a copy of {key}, and the encoder and decoder of {base.name} read "
                "tables of their own, which it left as they were. Train it with ensure_weight_tying=True, "
                "or without this module in modules_to_save."
            )
        if is_tied(base):
            raise CheckpointError(
                f"{name}: it changes {key}, which {base.name} uses as its output layer, too (it is tied), "
                "and the adapter leaves that as it was. on_tied=untie gives the result an output layer of "
                "its own."
            )

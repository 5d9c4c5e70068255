"""Finds the tensor of a model that each module of a PEFT adapter changes, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mecha_exp.checkpoint import TensorInfo, is_arithmetic
from mecha_exp.errors import CheckpointError, Problems, some
from mecha_exp.peft.config import PeftConfig
from mecha_exp.peft.modules import (
    BIAS,
    MAGNITUDE,
    TOKENS,
    A,
    B,
    Module,
    base_keys,
    fault_of,
    is_transposed,
    sorted_modules,
)
from mecha_exp.peft.vocabulary import tied_heads, tied_names

_NOT_DORA = ({BIAS}, {TOKENS})
"""The factors of modules that have no magnitudes though others have."""
_TIED_HINT = " Where it is tied, on_tied=untie gives it an output layer of its own."


@dataclass(frozen=True)
class Matching:
    """An adapter beside the model that it changes.

    Attributes:
        name: of the adapter, for messages.
        config: of the adapter.
        infos: its tensors.
        base_name: of the model.
        targets: the tensors of the model.
    """

    name: str
    config: PeftConfig
    infos: Mapping[str, TensorInfo]
    base_name: str
    targets: Mapping[str, TensorInfo]

    def modules(self) -> dict[str, Module]:
        """What changes each tensor of the model, by key, in the order of the model.

        Raises:
            CheckpointError: tensors that the model lacks, or that do not fit it; all of them at once.
        """
        factors, whole = sorted_modules(self.infos, self.name)
        shapes = {key: info.shape for key, info in self.targets.items()}
        tied = tied_names(self.config, factors, whole, shapes)
        factors = {name: own for name, own in factors.items() if name not in tied}
        whole = {name: own for name, own in whole.items() if name not in tied}
        problems = Problems()
        plain = [n for n, own in factors.items() if MAGNITUDE not in own and own.keys() not in _NOT_DORA]
        if self.config.content.get("use_dora") and plain:
            problems.add(
                f"{self.name}: its configuration says use_dora, and {some(plain, 3)} has no {MAGNITUDE}."
            )
        by_key: dict[str, Module] = {}
        for module in (*self._products(factors, problems), *self._biases(factors, problems)):
            if module.key in by_key:
                problems.add(f"{self.name}: {by_key[module.key].name} and {module.name} are {module.key}.")
            by_key[module.key] = module
        for inner, key in self._keys_of(list(whole), "", problems).items():
            by_key[key] = replace(by_key.get(key, Module(inner, key)), whole=whole[inner])
        problems.add_all(self._faults(by_key))
        problems.raise_as(CheckpointError)
        return {key: by_key[key] for key in self.targets if key in by_key}

    def _products(self, factors: Mapping[str, Mapping[str, str]], problems: Problems) -> Iterator[Module]:
        keys = self._keys_of(list(factors), ".weight", problems)
        shapes = {
            name: (self.infos[own[A]].shape, self.infos[own[B]].shape, self.targets[keys[name]].shape)
            for name, own in factors.items()
            if A in own and name in keys
        }
        for name, key in keys.items():
            transposed = name in shapes and is_transposed(name, shapes, self.config.fan_in_fan_out)
            if transposed is None:
                problems.add(
                    f"{self.name}: {key} is square, and nothing tells whether it is stored as (outputs, "
                    "inputs) or (inputs, outputs): the adapter has layers of both kinds, or fan_in_fan_out "
                    "of its configuration is true and the name is not that of a Conv1D. PEFT ignores it for "
                    "linear layers: set it to false in adapter_config.json, or save one kind alone."
                )
                continue
            own = {suffix: own_key for suffix, own_key in factors[name].items() if suffix != BIAS}
            yield Module(
                name,
                key,
                own,
                scale=self.config.scale_of(name),
                is_transposed=transposed,
                tokens=self.config.tokens_of(name),
            )

    def _biases(self, factors: Mapping[str, Mapping[str, str]], problems: Problems) -> Iterator[Module]:
        own = {name: suffixes[BIAS] for name, suffixes in factors.items() if BIAS in suffixes}
        for name, key in self._keys_of(list(own), ".bias", problems).items():
            yield Module(name, key, {BIAS: own[name]}, scale=self.config.scale_of(name))

    def _keys_of(self, names: list[str], ending: str, problems: Problems) -> dict[str, str]:
        """The key of the model for each name; those that it lacks become a problem."""
        keys = base_keys(names, self.targets, ending)
        missing = [name for name in names if name not in keys]
        if missing:
            trained = f" ({self.config.base})" if self.config.base else ""
            heads = tied_heads({key: info.shape for key, info in self.targets.items()})
            is_head = bool(base_keys([f"{name}{ending}" for name in missing], heads))
            problems.add(
                f"{self.name}: it changes {some(missing, 5)}, and {self.base_name} has no such tensors. Is "
                f"it the model that the adapter was trained on{trained}, with the same head?"
                f"{_TIED_HINT if is_head else ''}"
            )
        return keys

    def _faults(self, modules: Mapping[str, Module]) -> Iterator[str]:
        for key, module in modules.items():
            shapes = {suffix: self.infos[own].shape for suffix, own in module.factors.items()}
            if module.whole:
                shapes[""] = self.infos[module.whole].shape
            if not is_arithmetic(self.targets[key].dtype):
                dtype = self.targets[key].dtype
                yield f"{self.name}: {key} of the base holds {dtype}, to which nothing can be added."
            elif fault := fault_of(module, shapes, self.config.rank_of(module.name), self.targets[key]):
                yield f"{self.name}: {fault}."

"""The differences that LoRA modules make, as a conversion from their file's config to that of a model.

A tensor that no module changes has a difference of zero. Only changed tensors are keys of the result, so a
LoRA alone makes a small file of differences.
"""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from mecha_exp.architectures import AdapterConfig, ModelConfig, View, Views
from mecha_exp.architectures.lora import (
    ALPHA,
    DOWN,
    FULL,
    HADA,
    LOHA,
    LORA,
    MID,
    UP,
    W1,
    W2,
    fault_of,
    foreign,
)
from mecha_exp.architectures.views import viewed
from mecha_exp.errors import CheckpointError, Problems

Tensors = Mapping[str, Tensor]


class Deltas:
    """The differences to the tensors of a model config that modules of LoRA files make.

    Attributes:
        config: the config of the files.
        target: the config of the models: the base, or one that it converts to.
    """

    def __init__(self, config: AdapterConfig, target: ModelConfig, conversion: Views | None) -> None:
        self.config = config
        self.target = target
        infos = config.base.keys()
        by_key = {key: View((key,)) for key in infos} if conversion is None else conversion.by_key
        self._views = {
            key: view for key, view in by_key.items() if all("float" in infos[k].dtype for k in view.sources)
        }

    def __contains__(self, key: object) -> bool:
        info = self.target.keys().get(key) if isinstance(key, str) else None
        return info is not None and "float" in info.dtype

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor of the model."""
        return self.target.keys()[key].shape

    def changed(self, keys: Collection[str]) -> list[str]:
        """The tensors of the model that the modules of a file with these keys change."""
        modules = self.config.modules(keys)
        return [key for key, view in self._views.items() if any(k in modules for k in view.sources)]

    def unused(self, keys: Collection[str]) -> list[str]:
        """The keys of a file whose modules change no tensor of the models."""
        reached = {source for view in self._views.values() for source in view.sources}
        modules = self.config.modules(keys)
        return [name for key, names in modules.items() if key not in reached for name in names.values()]

    def check(self, shapes: Mapping[str, tuple[int, ...]], name: str) -> None:
        """Raise a CheckpointError with everything that is wrong in a file."""
        problems = Problems()
        modules = self.config.modules(shapes)
        faults = [fault_of(self.config, key, names, shapes) for key, names in modules.items()]
        for fault in (foreign(self.config, shapes), *faults):
            if fault:
                problems.add(f"{name}: {fault}")
        problems.raise_as(CheckpointError)

    def delta(self, key: str, has: Callable[[str], bool], read: Callable[[str], Tensor]) -> Tensor:
        """The difference to a tensor of the model.

        Args:
            has, read: (key of the file) -> whether it exists, and its tensor.

        Raises:
            CheckpointError: tensors of a module that do not fit each other or the model's.
        """
        view = self._views.get(key)
        parts = [self._of_base(source, has, read) for source in view.sources] if view else []
        like = next((part for part in parts if part is not None), None)
        if view is None or like is None:
            return torch.zeros(self.shape(key))
        infos = self.config.base.keys()
        filled = [
            torch.zeros(infos[source].shape, dtype=like.dtype, device=like.device) if part is None else part
            for source, part in zip(view.sources, parts, strict=True)
        ]
        delta: Tensor = viewed(view, filled)
        return delta

    def _of_base(self, key: str, has: Callable[[str], bool], read: Callable[[str], Tensor]) -> Tensor | None:
        names = {name.partition(".")[2]: name for name in self.config.names_of(key) if has(name)}
        if not names:
            return None
        tensors = {suffix: read(name) for suffix, name in names.items()}
        shapes = {name: tuple(tensors[suffix].shape) for suffix, name in names.items()}
        if fault := fault_of(self.config, key, names, shapes):
            raise CheckpointError(fault)
        return difference(tensors).reshape(self.config.base.keys()[key].shape)


def difference(tensors: Tensors) -> Tensor:
    """The difference that a module makes, from its tensors by suffix, which fit each other.

    LoRA: up down alpha / rank, or through `lora_mid` between them. LoHa: the elementwise product of two of
    these. LoKr: the Kronecker product of two factors, each a matrix or a product. Without alpha, and for two
    whole factors, the scale is 1. The scale multiplies a small factor.
    """
    suffixes = tensors.keys() - {ALPHA}
    if suffixes <= set(FULL):
        return tensors[next(iter(suffixes))]
    if suffixes <= set(LORA):
        down = tensors[DOWN]
        up = tensors[UP].flatten(1) * _scale(tensors, down.shape[0])
        return _tucker(tensors[MID], up.mT, down.flatten(1)) if MID in tensors else _product(up, down)
    if suffixes <= set(LOHA):
        a, b, _ = HADA[0]
        scaled = {**tensors, a: tensors[a] * _scale(tensors, tensors[b].shape[0])}
        return _pair(scaled, *HADA[0]) * _pair(scaled, *HADA[1])
    first = tensors[W1[0]] if W1[0] in tensors else _pair(tensors, *W1[1:])
    second = tensors[W2[0]] if W2[0] in tensors else _pair(tensors, *W2[1:])
    factor = next((tensors[b] for whole, b in ((W1[0], W1[2]), (W2[0], W2[2])) if whole not in tensors), None)
    if factor is not None:
        first = first * _scale(tensors, factor.shape[0])
    return torch.kron(first.reshape(*first.shape[:2], *[1] * (second.ndim - 2)), second.contiguous())


def _pair(tensors: Tensors, a: str, b: str, core: str = "") -> Tensor:
    if core in tensors:
        return _tucker(tensors[core], tensors[a].flatten(1), tensors[b].flatten(1))
    return _product(tensors[a], tensors[b])


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.flatten(1) @ b.flatten(1)).reshape(a.shape[0], *b.shape[1:])


def _tucker(core: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The factors a and b on both sides of a core that has the kernel of a convolution (Tucker)."""
    return torch.einsum("i j ..., i p, j r -> p r ...", core, a, b)


def _scale(tensors: Tensors, rank: int) -> Tensor | float:
    return tensors[ALPHA] / rank if ALPHA in tensors else 1.0

"""The differences that LoRA modules make, as a conversion from their file's config to that of a model.

A module may depend on the tensor that it changes (DoRA, (IA)3, OFT, GLoRA); then the model is read, too. A
tensor that no module changes has a difference of zero. Only changed tensors are keys of the result, so a
LoRA alone makes a small file of differences.
"""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from mecha_exp.architectures import AdapterConfig, ModelConfig, View, Views
from mecha_exp.architectures.lora import (
    ALPHA,
    DORA,
    DOWN,
    FULL,
    GLORA,
    HADA,
    IA3,
    IA3_ON_INPUT,
    IA3_WEIGHT,
    LOHA,
    LORA,
    MID,
    OFT_BLOCKS,
    OFT_RESCALE,
    READ_BASE,
    UP,
    W1,
    W2,
    fault_of,
    foreign,
)
from mecha_exp.architectures.views import viewed
from mecha_exp.errors import CheckpointError, Problems, some

Tensors = Mapping[str, Tensor]
Read = Callable[[str], Tensor]


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

    def reading(self, keys: Collection[str]) -> list[str]:
        """The keys of a file whose modules depend on the tensors of the model."""
        modules = self.config.modules(keys).values()
        return [name for names in modules for suffix, name in names.items() if suffix in READ_BASE]

    def check(self, shapes: Mapping[str, tuple[int, ...]], name: str, has_base: bool = False) -> None:
        """Raise a CheckpointError with everything that is wrong in a file.

        Args:
            has_base: whether the model is at hand for modules that depend on it.
        """
        problems = Problems()
        modules = self.config.modules(shapes)
        faults = [fault_of(self.config, key, names, shapes) for key, names in modules.items()]
        for fault in (foreign(self.config, shapes), *faults):
            if fault:
                problems.add(f"{name}: {fault}")
        if (reading := self.reading(shapes)) and not has_base:
            problems.add(
                f"{name}: the differences of {some(reading, 3)} depend on the weights of the model. Read "
                "the file as lora_delta(lora, base), whose base is the model itself and not a merge."
            )
        problems.raise_as(CheckpointError)

    def delta(self, key: str, has: Callable[[str], bool], read: Read, base: Read | None = None) -> Tensor:
        """The difference to a tensor of the model.

        Args:
            has, read: (key of the file) -> whether it exists, and its tensor.
            base: (key of the config's base) -> the model's tensor, for modules that depend on it.

        Raises:
            CheckpointError: tensors of a module that do not fit each other or the model's.
        """
        view = self._views.get(key)
        parts = [self._of_base(source, has, read, base) for source in view.sources] if view else []
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

    def _of_base(self, key: str, has: Callable[[str], bool], read: Read, base: Read | None) -> Tensor | None:
        names = self.config.modules(name for name in self.config.names_of(key) if has(name)).get(key)
        if not names:
            return None
        tensors = {suffix: read(name) for suffix, name in names.items()}
        shapes = {name: tuple(tensors[suffix].shape) for suffix, name in names.items()}
        if fault := fault_of(self.config, key, names, shapes):
            raise CheckpointError(fault)
        shape = self.config.base.keys()[key].shape
        if IA3_WEIGHT in tensors:
            _require_factors(names[IA3_WEIGHT], tensors, key, shape)
        if READ_BASE & tensors.keys() and base is not None:
            weight = base(key)
            return difference_to(weight.to(next(iter(tensors.values())).dtype), tensors).reshape(shape)
        return difference(tensors).reshape(shape)


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


def difference_to(weight: Tensor, tensors: Tensors) -> Tensor:
    """The difference that a module makes to a tensor W on which it depends, from its tensors by suffix.

    DoRA with magnitudes m: m (W + D) / ||W + D|| - W, the norm over all axes where m has one number. (IA)3: W
    times a factor of each output, or input. GLoRA: (b1 b2 + W a1 a2) alpha / rank. OFT: R^T W - W with blocks
    R = (I + Q) (I - Q)^-1 of Q = B - B^T, whose norm is at most alpha times the number of outputs unless
    alpha is 0.

    Source: Liu et al. 2024, arXiv:2402.09353; Liu et al. 2022, arXiv:2205.05638; Chavan et al. 2023,
    arXiv:2306.07967; Qiu et al. 2023, arXiv:2306.07280; LyCORIS for the names.
    """
    if DORA in tensors:
        rest = {suffix: tensor for suffix, tensor in tensors.items() if suffix != DORA}
        return with_magnitudes(weight + difference(rest).reshape(weight.shape), tensors[DORA]) - weight
    if tensors.keys() <= {*IA3, ALPHA}:
        axis = _axis_of_factors(tensors)
        ones = [weight.shape[axis] if i == axis else 1 for i in range(weight.ndim)]
        return weight * tensors[IA3_WEIGHT].reshape(ones)
    if OFT_BLOCKS in tensors:
        return _rotated(weight, tensors) - weight
    a1, a2, b1, b2 = (tensors[name] for name in GLORA)
    inner = torch.einsum("oi..., ir, rj -> oj...", weight, a1.flatten(1), a2.flatten(1))
    return (_product(b1, b2).reshape(weight.shape) + inner) * _scale(tensors, b2.shape[0])


def _axis_of_factors(tensors: Tensors) -> int:
    """The axis of a tensor whose rows or columns (IA)3 scales: that of the outputs unless it says inputs."""
    return int(IA3_ON_INPUT in tensors and bool(tensors[IA3_ON_INPUT]))


def _require_factors(name: str, tensors: Tensors, key: str, shape: tuple[int, ...]) -> None:
    """Raise a CheckpointError where (IA)3 has not a factor for each output, or input, of its tensor."""
    axis, count = _axis_of_factors(tensors), tensors[IA3_WEIGHT].numel()
    if count != shape[axis]:
        raise CheckpointError(
            f"{name} has {count} factors, and {key} {list(shape)} has {shape[axis]} "
            f"{('outputs', 'inputs')[axis]}. {IA3_ON_INPUT} says which of them the factors are of: 0, or no "
            "such key, the outputs, and another number the inputs."
        )


def with_magnitudes(weight: Tensor, magnitudes: Tensor) -> Tensor:
    """The tensor whose outputs, or inputs, have these norms; those of zeros stay zeros.

    Args:
        magnitudes: the norms along an axis, of size 1 along the others.

    LyCORIS and ComfyUI add a small number to the norm, so that zeros stay zeros there, too. PEFT 0.21 divides
    by the norm, so that zeros become NaN.
    """
    by_axis = magnitudes.reshape(*magnitudes.shape, *[1] * (weight.ndim - magnitudes.ndim))
    others = [axis for axis, size in enumerate(by_axis.shape) if size == 1]
    norm = torch.linalg.vector_norm(weight, dim=others, keepdim=True, dtype=torch.float64)
    scaled: Tensor = weight * (by_axis.double() / norm.where(norm > 0, 1.0))
    return scaled.to(weight.dtype)


def _rotated(weight: Tensor, tensors: Tensors) -> Tensor:
    """The outputs of a tensor, rotated block by block, and rescaled where the module says so."""
    blocks = tensors[OFT_BLOCKS].double()
    count, size, _ = blocks.shape
    skew, limit = blocks - blocks.mT, float(tensors.get(ALPHA, torch.zeros(()))) * weight.shape[0]
    norm = skew.norm()
    if 0 < limit < norm:
        skew = skew * (limit / norm)
    eye = torch.eye(size, dtype=torch.float64)
    rotation = (eye + skew) @ torch.linalg.inv(eye - skew)
    rotated: Tensor = (rotation.mT @ weight.double().reshape(count, size, -1)).reshape(weight.shape)
    if OFT_RESCALE in tensors:
        rotated = rotated * tensors[OFT_RESCALE].double().reshape(-1, *[1] * (weight.ndim - 1))
    return rotated.to(weight.dtype)


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
    return tensors[ALPHA].reshape(()) / rank if ALPHA in tensors else 1.0

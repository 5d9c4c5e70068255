"""Layers that ComfyUI describes in JSON, each in a tensor `comfy_quant` or all in the file's metadata.

Sources: ComfyUI, `comfy/quant_ops.py`, `comfy/ops.py` (`_load_quantized_module`) and `comfy/utils.py`
(`convert_old_quants`); its package comfy-kitchen, `tensor/int8.py` and `backends/eager/quantization.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mecha_exp.checkpoint.quantisation import LAYERS
from mecha_exp.documents import parse_json
from mecha_exp.errors import CheckpointError
from mecha_exp.numbers import is_whole
from mecha_exp.sources.quantised.scaled_weights import ScaledTensor
from mecha_exp.sources.source import Source

_DTYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8"}
"""The formats of ComfyUI that are read, and the stored dtype of their codes."""

_GROUP = 256
"""The inputs that are rotated together where a description does not say it."""
_LARGEST_GROUP = 1 << 16
_INNER = 16
"""The size of one of the two matrices whose product is H: two small products are faster than a large one."""
_LARGEST_DESCRIPTION = 1 << 16


class RotatedTensor(ScaledTensor):
    """The weight W of codes Q that were rotated (ConvRot): W = scale * (Q H) in each group of inputs.

    The inputs (the last axis of a matrix [out, in]) are cut into groups of g = 4^k. H is the orthogonal
    Hadamard matrix of ConvRot: the k-fold Kronecker product of [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1],
    [-1, 1, 1, 1]], over sqrt(g). ComfyUI stores round(W H^T / scale). H is symmetric and its own inverse, so
    the same rotation undoes it.

    Q H is a sum of whole numbers over 2^k and has 24 bits at most, so it is exact in float32 in any order of
    the sum. The product with the scale is rounded once: comfy-kitchen, which multiplies first and sums then,
    differs from it by rounding only.

    Args:
        source: the stored model.
        codes, scale: keys; int8 [out, in], and one scale or one for each row.
        group: g.

    Raises:
        CheckpointError: the group is not a power of 4 from 4 to 65536, or does not divide the inputs.
    """

    def __init__(self, source: Source, codes: str, scale: str, group: int) -> None:
        super().__init__(source, codes, scale)
        if group not in [4**k for k in range(1, 9)]:
            raise CheckpointError(
                f"{codes} is rotated in groups of {group}, which is not a power of 4 up to {_LARGEST_GROUP}"
            )
        if len(self.shape) != 2 or self.shape[1] % group:
            raise CheckpointError(f"{codes} {list(self.shape)} does not consist of rotated groups of {group}")
        self._group = group
        self._inner = _hadamard(min(group, _INNER))
        self._outer = _hadamard(group // len(self._inner))

    def _numbers(self, start: int, stop: int) -> Tensor:
        first, last = start // self._group * self._group, -(-stop // self._group) * self._group
        codes = super()._numbers(first, last).view(-1, len(self._outer), len(self._inner))
        return (self._outer @ (codes @ self._inner)).view(-1)[start - first : stop - first]


def comfyui_layer(source: Source, codes: str, layers: Mapping[str, Any]) -> ScaledTensor:
    """The numbers of a layer by its description.

    `float8_e4m3fn`, `float8_e5m2` and `int8_tensorwise` are code * scale, with one scale for the tensor or
    one for each row, [out, 1]. `int8_tensorwise` with `convrot` is a `RotatedTensor`.

    Args:
        source: the stored model.
        codes: the key of the codes.
        layers: the descriptions in the metadata of the file.

    Raises:
        CheckpointError: it is of another format, or the description does not fit the tensors.
    """
    module, scale = codes.removesuffix(".weight"), f"{codes}_scale"
    layer = _described(source, module, layers)
    name = layer.get("format")
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"{module} is {name!r} of ComfyUI, and {', '.join(_DTYPES)} can be read")
    if source.info(codes).dtype != _DTYPES[name]:
        raise CheckpointError(
            f"{codes} is {source.info(codes).dtype}, and ComfyUI's {name} is {_DTYPES[name]}"
        )
    if scale not in source:
        raise CheckpointError(f"{scale} is missing")
    shape, scales = source.info(codes).shape, source.info(scale)
    if scales.numel != 1 and scales.shape != (*shape[:1], *[1] * (len(shape) - 1)):
        raise CheckpointError(
            f"{scale} {list(scales.shape)} is neither one scale nor one for each row of {list(shape)}"
        )
    if name != "int8_tensorwise" or not _option(layer, "convrot", False):
        return ScaledTensor(source, codes, scale)
    group = _option(layer, "convrot_groupsize", _GROUP)
    if not is_whole(group):
        raise CheckpointError(f"{module} has the convrot_groupsize {group!r}, which is not a whole number")
    return RotatedTensor(source, codes, scale, group)


def _described(source: Source, module: str, layers: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a layer. That in the metadata counts, as in ComfyUI."""
    key, layer = f"{module}.comfy_quant", layers.get(module)
    if module not in layers and source.info(key).nbytes <= _LARGEST_DESCRIPTION:
        try:
            layer = parse_json(bytes(source.read(key).tolist()))
        except (ValueError, TypeError):
            layer = None
    if not isinstance(layer, dict):
        raise CheckpointError(f"{LAYERS if module in layers else key} does not describe {module} in JSON")
    return layer


def _option(layer: dict[str, Any], name: str, default: Any) -> Any:
    """A value of a description, which may be in its section `params`."""
    params = layer.get("params")
    return layer.get(name, params.get(name, default) if isinstance(params, dict) else default)


def _hadamard(size: int) -> Tensor:
    """The orthogonal Hadamard matrix of ConvRot, [size, size]; of a size that is a power of 4."""
    seed, matrix = torch.ones(4, 4) - 2 * torch.eye(4).fliplr(), torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, seed) / 2
    return matrix

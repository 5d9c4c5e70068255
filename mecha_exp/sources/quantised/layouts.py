"""The quantised formats that are read exactly, and the tensors of a model in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mecha_exp.checkpoint.quantisation import (
    COMFY_QUANT,
    FP8,
    LAYERS,
    SCALED_FP8,
    Codes,
    Quantisation,
    codes_of,
    is_marker,
    layers_of,
    quantisation_of,
    quantization_config,
    refusal,
)
from mecha_exp.errors import CheckpointError, some
from mecha_exp.sources.quantised.comfyui import comfyui_layer
from mecha_exp.sources.quantised.lookup import LookupTensor
from mecha_exp.sources.quantised.packed_weights import AwqTensor, GptqTensor
from mecha_exp.sources.quantised.scaled_weights import BITSANDBYTES_STEP, ScaledTensor
from mecha_exp.sources.quantised.tensor import QuantisedTensor
from mecha_exp.sources.source import Source
from mecha_exp.system.byte_cache import ByteCache

BLOCK = (128, 128)
"""The blocks of fp8 where no configuration says others."""

MX_GROUP = 32
"""The numbers that share a scale in the MX formats."""

_ACTIVATIONS = (
    *("scale_input", "input_scale", "output_scale", "input_zero_point"),
    *("k_scale", "v_scale", "q_scale", "prob_scale"),
)
"""Names of scales of activations. No weight depends on them."""
_CHANGING = {
    "pre_quant_scale": "its inputs are scaled too",
    "weight_g_idx": "its columns are in another order",
    "svd_up": "it has a second part of low rank",
    "svd_down": "it has a second part of low rank",
}
"""Names of tensors that make a weight another one than its codes say, and why."""


@dataclass(frozen=True)
class Opened:
    """An opened quantised model.

    Attributes:
        source: the stored model.
        config: its `quantization_config`; empty where there is none.
        layers: those that its metadata describe, as ComfyUI does.
        cache: for stored tensors that have to be held whole.
    """

    source: Source
    config: Mapping[str, Any]
    layers: Mapping[str, Any]
    cache: ByteCache


@dataclass(frozen=True)
class Layout:
    """The tensors of a quantised model and their format.

    Attributes:
        quantisation: the format.
        tensors: by the key that the plain model has.
        activations: the keys of scales of activations, which no weight needs.
        others: the keys that only say that the model is quantised.
    """

    quantisation: Quantisation
    tensors: Mapping[str, QuantisedTensor]
    activations: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def _comfy_quant(model: Opened, codes: Codes) -> QuantisedTensor:
    return comfyui_layer(model.source, codes.key, model.layers)


def _scaled_fp8(model: Opened, codes: Codes) -> QuantisedTensor:
    tensor = ScaledTensor(model.source, codes.key, codes.companion)
    if model.source.info(codes.companion).numel != 1:
        raise CheckpointError(f"{codes.companion} has more than one entry")
    return tensor


def _fp8_blocks(model: Opened, codes: Codes) -> QuantisedTensor:
    return ScaledTensor(model.source, codes.key, codes.companion, block=_block_of(model.config) or BLOCK)


def _mxfp8(model: Opened, codes: Codes) -> QuantisedTensor:
    rows, count = model.source.info(codes.key).shape, model.source.info(codes.companion).shape
    if count != (*rows[:-1], rows[-1] // MX_GROUP) or rows[-1] % MX_GROUP:
        raise CheckpointError(
            f"{codes.companion} {list(count)} is not a scale for each {MX_GROUP} of {list(rows)}"
        )
    return ScaledTensor(model.source, codes.key, codes.companion)


def _weight_scale(model: Opened, codes: Codes) -> QuantisedTensor:
    """Fp8 or int8 with scales for a tensor, rows, groups or blocks, maybe with zeros."""
    source, zero = model.source, f"{codes.key}_zero_point"
    block = _block_of(model.config) or BLOCK
    is_blocks = _has_blocks(source.info(codes.key).shape, source.info(codes.companion).shape)
    return ScaledTensor(
        source,
        codes.key,
        codes.companion,
        block=block if is_blocks else None,
        zero=zero if zero in source else None,
    )


def _has_blocks(shape: Sequence[int], scales: Sequence[int]) -> bool:
    """Whether scales belong to blocks of several rows and columns: not to rows, their groups, or columns."""
    if len(scales) != len(shape) or len(shape) < 2 or math.prod(scales) == 1:
        return False
    if scales[-2] == shape[-2]:
        return False
    return scales[-2] != 1 or scales[-1] not in (1, shape[-1])


def _bitsandbytes_int8(model: Opened, codes: Codes) -> QuantisedTensor:
    order = f"{codes.key}_format"
    if order in model.source and int(model.source.read(order).reshape(-1)[0]) != 0:
        raise CheckpointError(f"{order} is not 0: its rows are in the order of some GPU")
    if model.source.info(codes.companion).shape != model.source.info(codes.key).shape[:1]:
        raise CheckpointError(f"{codes.companion} does not have an entry for each row of {codes.key}")
    return ScaledTensor(model.source, codes.key, codes.companion, step=BITSANDBYTES_STEP)


def _bitsandbytes_4bit(model: Opened, codes: Codes) -> QuantisedTensor:
    return LookupTensor(model.source, codes.key, codes.companion)


def _quanto(model: Opened, codes: Codes) -> QuantisedTensor:
    if codes.key.removesuffix("_data") + "_shift" in model.source:
        raise CheckpointError(f"{codes.key} has codes of less than 8 bits")
    return ScaledTensor(model.source, codes.key, codes.companion)


def _words(model: Opened, codes: Codes) -> QuantisedTensor:
    """GPTQ or AWQ, whose files have the same names; only the configuration tells which."""
    method = str(model.config.get("quant_method", "")).lower()
    readers = {"gptq": GptqTensor, "awq": AwqTensor}
    if method not in readers:
        raise CheckpointError(
            "only the quantization_config of a config.json in its folder could tell whether it is GPTQ or "
            "AWQ, and how its zeros are stored"
        )
    return readers[method](model.source, codes.key.removesuffix(".qweight"), model.config, model.cache)


READERS: Mapping[str, Callable[[Opened, Codes], QuantisedTensor]] = {
    COMFY_QUANT: _comfy_quant,
    SCALED_FP8: _scaled_fp8,
    "fp8 in blocks (DeepSeek, transformers)": _fp8_blocks,
    "MXFP8": _mxfp8,
    "scaled fp8 (compressed-tensors, ModelOpt)": _weight_scale,
    "scaled int8 (compressed-tensors)": _weight_scale,
    "int8 (bitsandbytes)": _bitsandbytes_int8,
    "NF4 (bitsandbytes)": _bitsandbytes_4bit,
    "FP4 (bitsandbytes)": _bitsandbytes_4bit,
    "quanto": _quanto,
    "GPTQ": _words,
    "AWQ, or GPTQ without g_idx": _words,
}
"""How codes of each format become a tensor; formats that are not here are not read."""


def layout_of(source: Source, budget: int) -> Layout | None:
    """The quantised tensors of a model, or None where it is plain; reads headers and a few small tensors.

    Args:
        budget: the bytes of stored tensors that may be held.

    Raises:
        CheckpointError: it is of a format that is not read exactly, or its tensors do not fit each other.
    """
    quantisation = quantisation_of(source)
    if quantisation is None or source.codes:  # which the source itself reads as numbers
        return None
    problems: list[str] = []
    config = quantization_config(source.path) or {}
    if config.get("transform_config"):
        problems.append("its weights are rotated (transform_config)")
    model = Opened(source, config, layers_of(source), ByteCache(budget))
    tensors: dict[str, QuantisedTensor] = {}
    all_codes = codes_of(source)
    if strangers := [module for module in model.layers if f"{module}.weight" not in source]:
        problems.append(f"its metadata describe {some(strangers, 3)}, which it does not have")
    if not all_codes and not quantisation.keys:
        problems.append("its format is not known beyond that name")
    for codes in all_codes:
        try:
            tensors[_plain_key(codes.key)] = _read(model, codes)
        except CheckpointError as error:
            problems.append(str(error))
    rest = _rest(source, [codes.key for codes in all_codes], tensors, problems)
    if problems:
        listed = some(dict.fromkeys(problems), 3)
        option = f"It cannot be read exactly: {listed}."
        raise CheckpointError(refusal(source, quantisation, option))
    return Layout(quantisation, tensors, *rest)


def _read(model: Opened, codes: Codes) -> QuantisedTensor:
    if codes.format not in READERS:
        raise CheckpointError(f"no exact reading of {codes.format} is known here")
    module = codes.key.rpartition(".")[0]
    for name, why in _CHANGING.items():
        if f"{module}.{name}" in model.source:
            raise CheckpointError(f"{module}.{name}: {why}")
    return READERS[codes.format](model, codes)


def _rest(
    source: Source, codes: list[str], tensors: Mapping[str, QuantisedTensor], problems: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The scales of activations and the other companions; what is neither must be plain numbers."""
    used = {key for tensor in tensors.values() for key in tensor.keys}
    modules = {key.rpartition(".")[0] for key in codes}
    modules |= {module.removesuffix(".weight") for module in modules}
    above = {module[:end] for module in modules for end in _ends(module)}
    activations, others = [], []
    for key in source.keys():
        module, _, name = key.rpartition(".")
        if key in used:
            continue
        if name in _ACTIVATIONS and module in above and source.info(key).numel <= 1:
            activations.append(key)
        elif _describes(key) or (name == "weight_format" and module in modules):
            others.append(key)
        elif key in tensors:
            problems.append(f"{key} is there beside {tensors[key].keys[0]}")
    marked = LAYERS in source.metadata or any(map(_describes, others))
    bare = [
        key
        for key in source.keys()
        if key not in used and key not in activations and key not in others and key not in codes
        if _are_codes(source, key, marked)
    ]
    if bare:
        problems.append(f"{some(bare, 3)} has codes without scales")
    return tuple(activations), tuple(others)


def _describes(key: str) -> bool:
    """Whether a key is only there to tell ComfyUI of a quantisation."""
    return is_marker(key) or key.endswith(".comfy_quant")


def _ends(module: str) -> list[int]:
    """The lengths of a module's name and of those of the modules above it."""
    return [at for at, letter in enumerate(module) if letter == "."] + [len(module)]


def _are_codes(source: Source, key: str, marked: bool) -> bool:
    """Whether a tensor without companions has codes.

    In a file with ComfyUI's marker or descriptions fp8 without a scale is plain numbers.
    """
    info = source.info(key)
    if info.dtype in FP8:
        return not marked
    is_word = info.dtype in ("I32", "U32") and "weight" in key
    return (info.dtype in ("I8", "U8", "F4") or is_word) and len(info.shape) > 1


def _plain_key(key: str) -> str:
    """The key that codes have in the plain model."""
    if key.endswith(".qweight"):
        return key.removesuffix("qweight") + "weight"
    return key.removesuffix("._data")


def _block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size of a block by the configuration; None where it does not say."""
    size = config.get("weight_block_size")
    if size is None:
        groups = config.get("config_groups")
        sizes = [
            group["weights"]["block_structure"]
            for group in (groups.values() if isinstance(groups, dict) else ())
            if isinstance(group, dict) and isinstance(group.get("weights"), dict)
            if group["weights"].get("block_structure")
        ]
        size = sizes[0] if sizes and all(other == sizes[0] for other in sizes) else None
    is_pair = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    return (size[0], size[1]) if is_pair and size else None

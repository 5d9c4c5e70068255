"""Random weights in quantised formats, and their numbers by the published formulas in plain torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Quantised:
    """A quantised layer.

    Attributes:
        format: its name.
        tensors: the stored ones.
        weight: the numbers, float32.
        config: the `quantization_config`; empty for none.
        metadata: of the file.
        key: of the weight in the plain model.
    """

    format: str
    tensors: Tensors
    weight: Tensor
    config: dict[str, Any] = field(default_factory=dict)
    key: str = "a.weight"
    metadata: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path, **more: Tensor) -> Path:
        """Write a folder with the layer and other tensors; returns the path of the file."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"torch_dtype": "bfloat16"} | ({"quantization_config": self.config} if self.config else {})
        (folder / "config.json").write_text(json.dumps(content))
        save_file(self.tensors | more, folder / "model.safetensors", metadata=self.metadata)
        return folder / "model.safetensors"


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(dtype)


def _whole(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape) + high))


def _scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (_random(*shape).abs() * 0.01 + 1e-3).to(dtype)


def fp8_of_comfyui(dtype: torch.dtype = FP8) -> Quantised:
    codes, scale = (_random(48, 80) * 50).to(dtype), torch.tensor(0.0123)
    tensors = {"scaled_fp8": torch.zeros(2, dtype=dtype), "a.weight": codes, "a.scale_weight": scale}
    tensors["a.scale_input"] = torch.tensor(3.0)
    return Quantised("scaled fp8 (ComfyUI)", tensors, codes.float() * scale)


def fp8_with_scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Quantised:
    codes, scale = (_random(48, 80) * 50).to(FP8), _scales(*shape, dtype=dtype)
    broad = scale.float() if scale.numel() == 1 else scale.float().reshape(48 if shape[0] == 48 else 1, -1)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": torch.tensor(2.0)}
    tensors["a.k_scale"] = torch.tensor(1.0)
    groups = broad.repeat_interleave(80 // broad.shape[1], 1) if broad.ndim == 2 else broad
    return Quantised("scaled fp8 (compressed-tensors, ModelOpt)", tensors, codes.float() * groups)


def json_of(content: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def fp8_of_comfyui_by_layer(dtype: torch.dtype = FP8) -> Quantised:
    codes, scale = (_random(48, 80) * 50).to(dtype), torch.tensor(0.0123)
    described = {"format": str(dtype).removeprefix("torch."), "full_precision_matrix_mult": True}
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.comfy_quant": json_of(described)}
    return Quantised("comfy_quant (ComfyUI)", tensors, codes.float() * scale)


def int8_of_comfyui(*scales: int, in_metadata: bool = False) -> Quantised:
    codes, scale = _whole(-128, 128, 48, 80).to(torch.int8), _scales(*scales)
    tensors, described = {"a.weight": codes, "a.weight_scale": scale}, {"format": "int8_tensorwise"}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": described}})} if in_metadata else {}
    tensors |= {} if in_metadata else {"a.comfy_quant": json_of(described)}
    return Quantised("comfy_quant (ComfyUI)", tensors, codes.float() * scale, metadata=metadata)


def hadamard(size: int) -> Tensor:
    """ConvRot's matrix in float64, entry by entry: a factor of -1 where two digits of base 4 add up to 3."""
    rows, columns = torch.arange(size)[:, None], torch.arange(size)
    signs = torch.ones(size, size, dtype=torch.float64)
    for digit in range(8):
        signs *= 1 - 2.0 * ((rows >> 2 * digit) % 4 + (columns >> 2 * digit) % 4 == 3)
    return signs / size**0.5


def rotated_of_comfyui(group: int | None, scales: tuple[int, ...] = (6, 1), section: str = "") -> Quantised:
    size = group or 256
    codes, scale = _whole(-128, 128, 6, 3 * size).to(torch.int8), _scales(*scales)
    option = {"convrot": True} | ({"convrot_groupsize": group} if group else {})
    described = {"format": "int8_tensorwise", **({section: option} if section else option)}
    turned = (codes.double().view(6, 3, size) @ hadamard(size)).view(6, -1)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.comfy_quant": json_of(described)}
    return Quantised("comfy_quant (ComfyUI)", tensors, (turned * scale.double()).float())


def fp8_blocks(
    rows: int,
    columns: int,
    block: tuple[int, int] | None = None,
    experts: int = 0,
    suffix: str = "_scale_inv",
) -> Quantised:
    high, wide = block or (128, 128)
    lead = (experts,) if experts else ()
    codes = (_random(*lead, rows, columns) * 50).to(FP8)
    scale = _scales(*lead, -(-rows // high), -(-columns // wide))
    broad = scale.repeat_interleave(high, -2).repeat_interleave(wide, -1)[..., :rows, :columns]
    config = {"quant_method": "fp8"} | ({"weight_block_size": [*block]} if block else {})
    name = {
        "_scale_inv": "fp8 in blocks (DeepSeek, transformers)",
        "_scale": "scaled fp8 (compressed-tensors, ModelOpt)",
    }
    tensors = {"a.weight": codes, f"a.weight{suffix}": scale}
    return Quantised(name[suffix], tensors, codes.float() * broad, config)


def mxfp8(dtype: torch.dtype = torch.uint8) -> Quantised:
    codes, exponents = (_random(48, 96) * 50).to(FP8), _whole(100, 140, 48, 3).to(torch.uint8)
    powers = torch.tensor(2.0, dtype=torch.float64) ** (exponents.double() - 127)
    weight = (codes.double() * powers.repeat_interleave(32, 1)).float()
    return Quantised("MXFP8", {"a.weight": codes, "a.weight_scale": exponents.view(dtype)}, weight)


def int8_with_scales(zero: bool = False, columns: int = 1) -> Quantised:
    codes, scale = _whole(-128, 128, 48, 80).to(torch.int8), _scales(48, columns)
    tensors = {"a.weight": codes, "a.weight_scale": scale}
    zeros = _whole(-20, 20, 48, columns).to(torch.int8) if zero else torch.zeros(48, columns)
    tensors |= {"a.weight_zero_point": zeros} if zero else {}
    wide = 80 // columns
    weight = (codes.float() - zeros.float().repeat_interleave(wide, 1)) * scale.repeat_interleave(wide, 1)
    return Quantised("scaled int8 (compressed-tensors)", tensors, weight)


def int8_of_bitsandbytes() -> Quantised:
    codes, largest = _whole(-127, 128, 48, 80).to(torch.int8), _scales(48)
    tensors = {"a.weight": codes, "a.SCB": largest, "a.weight_format": torch.zeros((), dtype=torch.uint8)}
    return Quantised("int8 (bitsandbytes)", tensors, codes.float() * largest[:, None] * 7.874015718698502e-3)


def quanto(dtype: torch.dtype = torch.int8) -> Quantised:
    codes = _whole(-128, 128, 48, 80).to(torch.int8) if dtype is torch.int8 else _random(48, 80).to(dtype)
    scale = _scales(48, 1, dtype=torch.bfloat16)
    tensors = {"a.weight._data": codes, "a.weight._scale": scale}
    tensors |= {"a.input_scale": torch.tensor(1.0), "a.output_scale": torch.tensor(1.0)}
    return Quantised("quanto", tensors, codes.float() * scale.float())


def four_bits_of_bitsandbytes(kind: str = "nf4", nested: bool = False, count: int = 48 * 80) -> Quantised:
    shape = (48, 80) if count == 48 * 80 else (1, count)
    codes, table = _whole(0, 16, count), _random(16)
    even = torch.cat([codes, torch.zeros(count % 2, dtype=codes.dtype)]).view(-1, 2)
    tensors = {"a.weight": (even[:, :1] * 16 + even[:, 1:]).to(torch.uint8), "a.weight.quant_map": table}
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": shape}
    blocks = -(-count // 64)
    if nested:
        magnitudes, nested_table = _whole(0, 256, blocks), _random(256)
        scale, offset = _scales(-(-blocks // 256)), 0.0446
        largest = nested_table[magnitudes] * scale.repeat_interleave(256)[:blocks] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors["a.weight.absmax"] = magnitudes.to(torch.uint8)
        tensors |= {"a.weight.nested_absmax": scale, "a.weight.nested_quant_map": nested_table}
    else:
        tensors["a.weight.absmax"] = largest = _scales(blocks)
    packed = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    tensors[f"a.weight.quant_state.bitsandbytes__{kind}"] = packed
    weight = table[codes] * largest.repeat_interleave(64)[:count]
    name = {"nf4": "NF4 (bitsandbytes)", "fp4": "FP4 (bitsandbytes)"}[kind]
    return Quantised(name, tensors, weight.reshape(shape))


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack each 32 / bits neighbours of the last axis into an int32, the first one lowest."""
    per_word = 32 // bits
    shifted = codes.reshape(*codes.shape[:-1], -1, per_word) << (torch.arange(per_word) * bits)
    words = shifted.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(bits: int = 4, version: str = "gptq", order: bool = False, g_idx: bool = True) -> Quantised:
    inputs, out, size = 96, 64, 32
    codes, zeros = _whole(0, 1 << bits, out, inputs), _whole(0, 1 << bits, inputs // size, out)
    scale = _scales(inputs // size, out, dtype=torch.float16)
    group = torch.arange(inputs) // size
    if order:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
    stored = (zeros - 1) % (1 << bits) if version == "gptq" else zeros
    tensors = {
        "a.qweight": _words(codes, bits).T.contiguous(),
        "a.qzeros": _words(stored, bits),
        "a.scales": scale,
        "a.bias": _random(out),
    }
    tensors |= {"a.g_idx": group.to(torch.int32)} if g_idx else {}
    weight = (codes - zeros[group].T).float() * scale[group].T.float()
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": version}
    return Quantised("GPTQ" if g_idx else "AWQ, or GPTQ without g_idx", tensors, weight, config)


def awq() -> Quantised:
    inputs, out, size = 96, 64, 32
    codes, zeros = _whole(0, 16, inputs, out), _whole(0, 16, inputs // size, out)
    scale = _scales(inputs // size, out, dtype=torch.float16)

    def packed(
        values: Tensor,
    ) -> Tensor:  # place i of a word holds column [0, 2, 4, 6, 1, 3, 5, 7][i] of eight
        ordered = values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return _words(ordered.reshape(len(values), -1), 4)

    weight = ((codes - zeros.repeat_interleave(size, 0)) * scale.repeat_interleave(size, 0).float()).T
    tensors = {"a.qweight": packed(codes), "a.qzeros": packed(zeros), "a.scales": scale}
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return Quantised("AWQ, or GPTQ without g_idx", tensors, weight.contiguous(), config)


READ: dict[str, Callable[[], Quantised]] = {
    "scaled fp8 e4m3": fp8_of_comfyui,
    "scaled fp8 e5m2": lambda: fp8_of_comfyui(torch.float8_e5m2),
    "fp8 by ComfyUI's layers": fp8_of_comfyui_by_layer,
    "fp8 e5m2 by ComfyUI's layers": lambda: fp8_of_comfyui_by_layer(torch.float8_e5m2),
    "int8 by ComfyUI's layers": lambda: int8_of_comfyui(1),
    "int8 by ComfyUI's layers, by row": lambda: int8_of_comfyui(48, 1),
    "int8 by ComfyUI's metadata": lambda: int8_of_comfyui(48, 1, in_metadata=True),
    "rotated int8 of ComfyUI": lambda: rotated_of_comfyui(None),
    "rotated int8 of ComfyUI, one scale": lambda: rotated_of_comfyui(256, ()),
    "rotated int8 of ComfyUI, groups of 4": lambda: rotated_of_comfyui(4),
    "rotated int8 of ComfyUI, groups of 16": lambda: rotated_of_comfyui(16, section="params"),
    "rotated int8 of ComfyUI, groups of 64": lambda: rotated_of_comfyui(64),
    "rotated int8 of ComfyUI, groups of 1024": lambda: rotated_of_comfyui(1024),
    "fp8 by tensor": lambda: fp8_with_scales(1),
    "fp8 by row": lambda: fp8_with_scales(48, 1),
    "fp8 by row, one axis": lambda: fp8_with_scales(48, dtype=torch.float32),
    "fp8 by column": lambda: fp8_with_scales(1, 80),
    "fp8 by group": lambda: fp8_with_scales(48, 5),
    "fp8 in blocks of 128": lambda: fp8_blocks(300, 200),
    "fp8 in blocks by config": lambda: fp8_blocks(50, 70, (16, 32)),
    "fp8 in blocks of experts": lambda: fp8_blocks(300, 200, experts=3),
    "fp8 in blocks, weight_scale": lambda: fp8_blocks(300, 200, suffix="_scale"),
    "MXFP8, bytes": mxfp8,
    "MXFP8, E8M0": lambda: mxfp8(torch.float8_e8m0fnu),
    "int8 by row": int8_with_scales,
    "int8 by group": lambda: int8_with_scales(columns=5),
    "int8 with zeros": lambda: int8_with_scales(zero=True, columns=5),
    "int8 of bitsandbytes": int8_of_bitsandbytes,
    "quanto int8": quanto,
    "quanto fp8": lambda: quanto(FP8),
    "NF4": four_bits_of_bitsandbytes,
    "NF4 nested": lambda: four_bits_of_bitsandbytes(nested=True),
    "NF4 of an odd size": lambda: four_bits_of_bitsandbytes(count=1001),
    "NF4 nested, many blocks": lambda: four_bits_of_bitsandbytes(nested=True, count=64 * 700),
    "FP4": lambda: four_bits_of_bitsandbytes("fp4"),
    "GPTQ 4 bits v1": gptq,
    "GPTQ 8 bits v1": lambda: gptq(8),
    "GPTQ 4 bits v2": lambda: gptq(version="gptq_v2"),
    "GPTQ 8 bits v2 in another order": lambda: gptq(8, "gptq_v2", order=True),
    "GPTQ 2 bits": lambda: gptq(2),
    "GPTQ without g_idx": lambda: gptq(g_idx=False),
    "AWQ": awq,
}
"""A layer in each layout that is read exactly."""


FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LINEAR = (64, 64)


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


FILES = {
    "comfy_quant (ComfyUI)": {
        "a.weight": zeros(torch.int8, *LINEAR),
        "a.weight_scale": zeros(torch.float32),
        "a.comfy_quant": zeros(torch.uint8, 30),
    },
    "scaled fp8 (ComfyUI)": {
        "scaled_fp8": zeros(FP8, 0),
        "a.weight": zeros(FP8, *LINEAR),
        "a.scale_weight": zeros(torch.float32),
    },
    "fp8 in blocks (DeepSeek, transformers)": {
        "a.weight": zeros(FP8, 256, 256),
        "a.weight_scale_inv": zeros(torch.float32, 2, 2),
    },
    "MXFP8": {"a.weight": zeros(FP8, *LINEAR), "a.weight_scale": zeros(torch.uint8, 64, 2)},
    "scaled fp8 (compressed-tensors, ModelOpt)": {
        "a.weight": zeros(FP8, *LINEAR),
        "a.weight_scale": zeros(torch.bfloat16, 64, 1),
        "a.input_scale": zeros(torch.float32),
    },
    "scaled int8 (compressed-tensors)": {
        "a.weight": zeros(torch.int8, *LINEAR),
        "a.weight_scale": zeros(torch.float32, 64, 1),
    },
    "NVFP4 (ModelOpt)": {
        "a.weight": zeros(torch.uint8, 64, 32),
        "a.weight_scale": zeros(FP8, 64, 4),
        "a.weight_scale_2": zeros(torch.float32),
    },
    "NVFP4 (compressed-tensors)": {
        "a.weight_packed": zeros(torch.uint8, 64, 32),
        "a.weight_scale": zeros(FP8, 64, 4),
        "a.weight_global_scale": zeros(torch.float32, 1),
    },
    "packed integers (compressed-tensors)": {
        "a.weight_packed": zeros(torch.int32, 64, 8),
        "a.weight_scale": zeros(torch.bfloat16, 64, 1),
        "a.weight_shape": zeros(torch.int64, 2),
    },
    "GPTQ": {
        "a.qweight": zeros(torch.int32, 8, 64),
        "a.qzeros": zeros(torch.int32, 1, 8),
        "a.scales": zeros(torch.float16, 1, 64),
        "a.g_idx": zeros(torch.int32, 64),
    },
    "AWQ, or GPTQ without g_idx": {
        "a.qweight": zeros(torch.int32, 64, 8),
        "a.qzeros": zeros(torch.int32, 1, 8),
        "a.scales": zeros(torch.float16, 1, 64),
    },
    "EETQ": {"a.weight": zeros(torch.int8, *LINEAR), "a.weight_scales": zeros(torch.float16, 64)},
    "SVDQuant (nunchaku)": {"a.qweight": zeros(torch.int8, 64, 32), "a.wscales": zeros(torch.float16, 1, 64)},
    "int8 (bitsandbytes)": {
        "a.weight": zeros(torch.int8, *LINEAR),
        "a.SCB": zeros(torch.float32, 64),
        "a.weight_format": zeros(torch.uint8),
    },
    "NF4 (bitsandbytes)": {
        "a.weight": zeros(torch.uint8, 2048, 1),
        "a.weight.absmax": zeros(torch.uint8, 64),
        "a.weight.nested_absmax": zeros(torch.float32, 1),
        "a.weight.quant_map": zeros(torch.float32, 16),
        "a.weight.quant_state.bitsandbytes__nf4": zeros(torch.uint8, 80),
    },
    "FP4 (bitsandbytes)": {
        "a.weight": zeros(torch.uint8, 2048, 1),
        "a.weight.absmax": zeros(torch.float32, 64),
        "a.weight.quant_state.bitsandbytes__fp4": zeros(torch.uint8, 80),
    },
    "4-bit (bitsandbytes)": {
        "a.weight": zeros(torch.uint8, 2048, 1),
        "a.weight.absmax": zeros(torch.float32, 64),
    },
    "MXFP4 (gpt-oss)": {
        "experts.gate_up_proj_blocks": zeros(torch.uint8, 2, 64, 2, 16),
        "experts.gate_up_proj_scales": zeros(torch.uint8, 2, 64, 2),
    },
    "quanto": {"a.weight._data": zeros(torch.int8, *LINEAR), "a.weight._scale": zeros(torch.float32, 64, 1)},
    "torchao": {
        "a._weight_qdata": zeros(torch.int8, *LINEAR),
        "a._weight_scale": zeros(torch.float32, 64),
    },
    "HQQ": {"a.W_q": zeros(torch.uint8, 32, 64), "a.scale": zeros(torch.float16, 64, 1)},
    "AQLM": {
        "a.codes": zeros(torch.int8, 64, 8, 1),
        "a.codebooks": zeros(torch.float16, 1, 256, 1, 8),
        "a.scales": zeros(torch.float16, 64, 1, 1, 1),
    },
    "ExLlamaV2": {"a.q_weight": zeros(torch.int32, 8, 64), "a.q_scale": zeros(torch.int32, 1, 8)},
    "ExLlamaV3": {"a.trellis": zeros(torch.int16, 4, 4, 64), "a.suh": zeros(torch.float16, 64)},
}
"""The tensors of one layer, as each project stores them."""

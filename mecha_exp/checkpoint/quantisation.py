"""Quantised checkpoints: tensors that hold codes, and the tensors that say what the codes mean.

A weight of a quantised file is a code times a scale, or an index into a table. The average of two codes is
not the code of the average, so a merge must know such a file. It is recognised by the tensors that accompany
its codes, or by the `quantization_config` in its folder.

The layouts are those of the projects that write them: ComfyUI, compressed-tensors and ModelOpt (vLLM),
DeepSeek and transformers (fp8 in blocks), GPTQ, AWQ, bitsandbytes, OCP MX (gpt-oss), optimum-quanto, torchao,
HQQ, EETQ, AQLM, ExLlama and nunchaku.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mecha_exp.checkpoint.model import StateDictSource
from mecha_exp.checkpoint.safetensors.header import TensorInfo
from mecha_exp.errors import CheckpointError, Problems

CONFIG = "config.json"
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "F4")
_MX_SCALES = ("U8", "F8_E8M0")


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint is quantised.

    Attributes:
        format: the name of the format, and the project that writes it.
        keys: the tensors that tell it; empty where only `config.json` does.
    """

    format: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.keys:
            return f"{self.format}, by its {CONFIG}"
        more = f" and {len(self.keys) - 1} more" if len(self.keys) > 1 else ""
        return f"{self.format}, by '{self.keys[0]}'{more}"


class _Companion(NamedTuple):
    """A tensor that stands beside codes: `x` + `suffix` beside `x` + `codes`.

    Attributes:
        format: the format that the pair tells.
        suffix: the end of the companion's key.
        codes: the end of the codes' key.
        dtypes: the stored dtypes that the codes may have.
        own: the stored dtypes that the companion may have; empty for any.
    """

    format: str
    suffix: str
    codes: str
    dtypes: tuple[str, ...]
    own: tuple[str, ...] = ()


_COMPANIONS = (
    _Companion("scaled fp8 (ComfyUI)", ".scale_weight", ".weight", FP8),
    _Companion("fp8 in blocks (DeepSeek, transformers)", ".weight_scale_inv", ".weight", FP8),
    _Companion("MXFP8", ".weight_scale", ".weight", FP8, _MX_SCALES),
    _Companion("scaled fp8 (compressed-tensors, ModelOpt)", ".weight_scale", ".weight", FP8),
    _Companion("scaled int8 (compressed-tensors)", ".weight_scale", ".weight", ("I8",)),
    _Companion("NVFP4 (ModelOpt)", ".weight_scale_2", ".weight", ("U8", "F4")),
    _Companion("NVFP4 (compressed-tensors)", ".weight_global_scale", ".weight_packed", ("U8", "F4")),
    _Companion("packed integers (compressed-tensors)", ".weight_shape", ".weight_packed", INTEGERS),
    _Companion("GPTQ", ".g_idx", ".qweight", ("I32",)),
    _Companion("AWQ, or GPTQ without g_idx", ".qzeros", ".qweight", ("I32",)),
    _Companion("EETQ", ".weight_scales", ".weight", ("I8",)),
    _Companion("EETQ", ".weight_scales", ".qweight", ("I8",)),
    _Companion("SVDQuant (nunchaku)", ".wscales", ".qweight", ("I8",)),
    _Companion("int8 (bitsandbytes)", ".SCB", ".weight", ("I8",)),
    _Companion("NF4 (bitsandbytes)", ".quant_state.bitsandbytes__nf4", "", ("U8",)),
    _Companion("FP4 (bitsandbytes)", ".quant_state.bitsandbytes__fp4", "", ("U8",)),
    _Companion("4-bit (bitsandbytes)", ".absmax", "", ("U8",)),
    _Companion("MXFP4 (gpt-oss)", "_scales", "_blocks", ("U8",), _MX_SCALES),
    _Companion("quanto", "._scale", "._data", (*INTEGERS, *FP8)),
    _Companion("torchao", ":scale", ":qdata", (*INTEGERS, *FP8)),
    _Companion("torchao", "_scale", "_qdata", (*INTEGERS, *FP8)),
    _Companion("HQQ", ".scale", ".W_q", INTEGERS),
    _Companion("AQLM", ".codebooks", ".codes", INTEGERS),
    _Companion("ExLlamaV2", ".q_scale", ".q_weight", INTEGERS),
    _Companion("ExLlamaV3", ".suh", ".trellis", INTEGERS),
)
"""Known pairs; the format with the most pairs in a file is the file's, the first of equals."""

_FORMATS = [companion.format for companion in _COMPANIONS]
_SUFFIXES = tuple({companion.suffix for companion in _COMPANIONS})
_WAY_OUT = (
    "Its tensors are codes, and a mean of codes is not the code of the mean. Use the model as it was "
    "before it was quantised, or write a dequantised copy in bfloat16 with the tool that made it."
)
_MARKERS = {"scaled_fp8": "scaled fp8 (ComfyUI)"}
"""Keys that tell a format by themselves."""


def require_plain(models: Iterable[StateDictSource]) -> None:
    """Refuse models that hold codes instead of numbers.

    Raises:
        CheckpointError: each quantised model, its format, and the way out.
    """
    problems = Problems()
    for model in models:
        if (quantisation := quantisation_of(model)) is not None:
            problems.add(f"{model.name} is quantised: {quantisation}. {_WAY_OUT}")
    problems.raise_as(CheckpointError)


def quantisation_of(model: StateDictSource) -> Quantisation | None:
    """How the tensors of a model are quantised, or None where they are plain numbers; reads headers only."""
    stored = {model.info(key).dtype for key in model.keys()}
    if stored.isdisjoint((*INTEGERS, *FP8)):
        return None
    infos = {key: model.info(key) for key in model.keys()}
    pairs: dict[str, list[str]] = {}
    for key in infos:
        if key in _MARKERS:
            pairs.setdefault(_MARKERS[key], []).append(key)
        elif key.endswith(_SUFFIXES) and (format := _format_told_by(key, infos)) is not None:
            pairs.setdefault(format, []).append(key)
    if pairs:
        ranked = sorted(pairs, key=lambda name: (-len(pairs[name]), _FORMATS.index(name)))
        return Quantisation(ranked[0], tuple(pairs[ranked[0]]))
    path = model.path
    method = _method_in((path if path.is_dir() else path.parent) / CONFIG) if path else None
    return Quantisation(method) if method else None


def _format_told_by(key: str, infos: Mapping[str, TensorInfo]) -> str | None:
    """The format of the codes that a tensor stands beside, or None where there are none."""
    dtype = infos[key].dtype
    for companion in _COMPANIONS:
        if key.endswith(companion.suffix) and (not companion.own or dtype in companion.own):
            codes = infos.get(key.removesuffix(companion.suffix) + companion.codes)
            if codes is not None and codes.dtype in companion.dtypes:
                return companion.format
    return None


def _method_in(config: Path) -> str | None:
    """The `quant_method` of a `config.json`; None where it has none or cannot be read."""
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return None
    section = content.get("quantization_config") if isinstance(content, dict) else None
    return str(section.get("quant_method", "unknown")) if isinstance(section, dict) else None

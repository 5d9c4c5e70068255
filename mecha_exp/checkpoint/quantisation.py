"""Quantised checkpoints: tensors that hold codes, and the tensors that say what the codes mean.

A weight of a quantised file is a code times a scale, or an index into a table. The average of two codes is
not the code of the average, so a merge must know such a file. It is recognised by the tensors that accompany
its codes, or by the `quantization_config` in its folder.

The layouts are those of the projects that write them: ComfyUI, compressed-tensors and ModelOpt (vLLM),
DeepSeek and transformers (fp8 in blocks), GPTQ, AWQ, bitsandbytes, OCP MX (gpt-oss), optimum-quanto, torchao,
HQQ, EETQ, AQLM, ExLlama and nunchaku.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mecha_exp.checkpoint.model import StateDictSource
from mecha_exp.checkpoint.safetensors.header import TensorInfo
from mecha_exp.checkpoint.sidecars import CONFIG_SECTIONS, config_beside
from mecha_exp.documents import DocumentError, parse_json, typed
from mecha_exp.errors import CheckpointError, some
from mecha_exp.families import CONFIG

FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "F4")
_MX_SCALES = ("U8", "F8_E8M0")
SCALED_FP8 = "scaled fp8 (ComfyUI)"
COMFY_QUANT = "comfy_quant (ComfyUI)"
LAYERS = "_quantization_metadata"
"""The field of the metadata in which files of ComfyUI describe layers, if not in a `comfy_quant` for each."""


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
        dtypes: the stored dtypes that the codes may have; empty for any.
        own: the stored dtypes that the companion may have; empty for any.
    """

    format: str
    suffix: str
    codes: str
    dtypes: tuple[str, ...]
    own: tuple[str, ...] = ()


_COMPANIONS = (
    _Companion(COMFY_QUANT, ".comfy_quant", ".weight", ()),
    _Companion(SCALED_FP8, ".scale_weight", ".weight", FP8),
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
"""Known pairs: where codes have several companions the earlier one counts.

The format with the most pairs in a file is the file's, the first of equals.
"""

_FORMATS = [companion.format for companion in _COMPANIONS]
_SUFFIXES = tuple({companion.suffix for companion in _COMPANIONS})
_WHY = "Its tensors are codes, and a mean of codes is not the code of the mean."
_WAY_OUT = (
    "Use the model as it was before it was quantised, or write a dequantised copy in bfloat16 with the tool "
    "that made it."
)
_MARKER = "scaled_fp8"
"""A key that tells ComfyUI's format by itself, alone or after the prefix of a component."""


class Codes(NamedTuple):
    """Codes and what tells their format.

    Attributes:
        format: the name of the format.
        key: of the codes.
        companion: the key of the tensor beside them, or `LAYERS`.
    """

    format: str
    key: str
    companion: str


def refusal(model: StateDictSource, quantisation: Quantisation, option: str = "") -> str:
    """Say that a model is quantised, how, and what to do.

    Args:
        option: a sentence about the option that reads this model.
    """
    return f"{model.name} is quantised: {quantisation}. {_WHY} {option}{' ' if option else ''}{_WAY_OUT}"


def is_marker(key: str) -> bool:
    """Whether a key says that a file is in ComfyUI's scaled fp8."""
    return key == _MARKER or key.endswith(f".{_MARKER}")


def codes_of(model: StateDictSource) -> list[Codes]:
    """The codes of a model that known companions tell, in the order of the model."""
    infos = model.infos()
    by_key: dict[str, list[tuple[int, Codes]]] = {}
    for key in infos:
        if key.endswith(_SUFFIXES):
            for rank, codes in _told_by(key, infos):
                by_key.setdefault(codes.key, []).append((rank, codes))
    for module in layers_of(model):
        if f"{module}.weight" in infos:
            codes = Codes(COMFY_QUANT, f"{module}.weight", LAYERS)
            by_key.setdefault(codes.key, []).append((_FORMATS.index(COMFY_QUANT), codes))
    return [min(by_key[key])[1] for key in infos if key in by_key]


@dataclass(frozen=True)
class _Layers:
    """The description of the layers of a file of ComfyUI, by their names."""

    layers: dict[str, Any]


def layers_of(model: StateDictSource) -> Mapping[str, Any]:
    """The layers that the metadata of a file of ComfyUI describe; empty where they describe none.

    Raises:
        CheckpointError: they are not the JSON `{"layers": {name: description}}`.
    """
    text = model.metadata.get(LAYERS)
    if text is None:
        return {}
    try:
        return typed(parse_json(text), _Layers, foreign=True).layers
    except DocumentError as error:
        raise CheckpointError(
            f"{model.name}: the field {LAYERS} of its metadata does not describe layers: {error}."
        ) from None


def quantisation_of(model: StateDictSource) -> Quantisation | None:
    """How the tensors of a model are quantised, or None where they are plain numbers; reads headers only."""
    if model.codes:
        kinds = [kind for kind, _ in Counter(model.codes.values()).most_common()]
        return Quantisation(f"{some(kinds, 3)} (GGUF)", tuple(model.codes))
    stored = {info.dtype for info in model.infos().values()}
    if stored.isdisjoint((*INTEGERS, *FP8)):
        return None
    companions: dict[str, list[str]] = {}
    for codes in codes_of(model):
        companions.setdefault(codes.format, []).append(codes.companion)
    if markers := [key for key in model.keys() if is_marker(key)]:
        companions.setdefault(SCALED_FP8, []).extend(markers)
    if companions:
        ranked = sorted(companions, key=lambda name: (-len(companions[name]), _FORMATS.index(name)))
        return Quantisation(ranked[0], tuple(companions[ranked[0]]))
    section = quantization_config(model.path)
    return None if section is None else Quantisation(str(section.get("quant_method", "unknown")))


def quantization_config(path: Path | None) -> Mapping[str, Any] | None:
    """The section of a model's `config.json` about its quantisation.

    None where there is none or it cannot be read.
    """
    content = config_beside(path)
    return next((content[name] for name in CONFIG_SECTIONS if isinstance(content.get(name), dict)), None)


def _told_by(key: str, infos: Mapping[str, TensorInfo]) -> Iterator[tuple[int, Codes]]:
    """The codes that a tensor stands beside, with the rank of what tells it."""
    for rank, companion in enumerate(_COMPANIONS):
        if key.endswith(companion.suffix) and (not companion.own or infos[key].dtype in companion.own):
            codes = key.removesuffix(companion.suffix) + companion.codes
            if codes in infos and (not companion.dtypes or infos[codes].dtype in companion.dtypes):
                yield rank, Codes(companion.format, codes, key)
                return

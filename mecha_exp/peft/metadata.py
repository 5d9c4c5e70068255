"""The scales of a LoRA file of diffusers, which are in its metadata and not beside its factors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from mecha_exp.architectures.lora import ALPHA
from mecha_exp.checkpoint import TensorInfo
from mecha_exp.checkpoint.positional import FileRegion, byte_view
from mecha_exp.conversion.lora import SCALES
from mecha_exp.documents import DocumentError, parse_json, typed
from mecha_exp.errors import CheckpointError
from mecha_exp.peft.config import PeftConfig, parse_config
from mecha_exp.peft.modules import A
from mecha_exp.sources.source import Source, SourceView, infos_of


class WithAlphas(SourceView):
    """A LoRA file with an alpha for each module that its metadata scales.

    Args:
        original: the file.
        alphas: by key.
    """

    def __init__(self, original: Source, alphas: Mapping[str, float]) -> None:
        super().__init__(original)
        self._alphas = {key: torch.tensor([alpha]) for key, alpha in alphas.items()}

    def keys(self) -> Collection[str]:
        return [*self._original.keys(), *self._alphas]

    def info(self, key: str) -> TensorInfo:
        return TensorInfo.made("F32", ()) if key in self._alphas else self._original.info(key)

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        if key in self._alphas:
            view[:] = byte_view(self._alphas[key])[start : start + len(view)]
        else:
            self._original.read_bytes_into(key, start, view)

    def region(self, key: str) -> FileRegion | None:
        return None if key in self._alphas else self._original.region(key)


def with_alphas(source: Source) -> Source:
    """A LoRA file whose modules have the scales that its metadata names; other files as they are.

    alpha is scale times rank, the scale being alpha / r of the metadata, or alpha / sqrt(r) of rsLoRA.

    Raises:
        CheckpointError: the metadata cannot be read, or says that the factors are not a difference.
    """
    if SCALES not in source.metadata:
        return source
    configs = _configs_in(source)
    alphas = {}
    infos = infos_of(source)
    for key, info in infos.items():
        module = key.removesuffix(f".{A}")
        part, _, inner = module.partition(".")
        if module != key and part in configs and f"{module}.{ALPHA}" not in infos:
            alphas[f"{module}.{ALPHA}"] = configs[part].scale_of(inner) * info.shape[0]
    return WithAlphas(source, alphas)


def _configs_in(source: Source) -> dict[str, PeftConfig]:
    """The configuration of the adapter of each part of a pipeline."""
    text = source.metadata[SCALES]
    try:
        content = typed(parse_json(text), dict[str, Any])
    except DocumentError as error:
        raise CheckpointError(f"{source.name}: its {SCALES} cannot be read: {error}.") from None
    parts: dict[str, dict[str, object]] = {}
    for name, value in content.items():
        part, _, entry = name.partition(".")
        parts.setdefault(part, {"peft_type": "LORA"})[entry] = value
    return {part: parse_config(own, Path(f"{source.name}: {SCALES}.{part}")) for part, own in parts.items()}

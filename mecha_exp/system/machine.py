"""Describes the machine: its processor, which decides how some functions are rounded, and its packages."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from mecha_exp.system.cache import made_of
from mecha_exp.system.texts import json_hash

_CPUINFO = Path("/proc/cpuinfo")
_VECTOR = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile", "asimd", "asimdhp", "sve", "sve2", "bf16",
)  # fmt: skip

_LINUX_NAMES = {
    "sse4.2": "sse4_2", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16",
    "amx-bf16": "amx_bf16", "amx-tile": "amx_tile", "neon": "asimd", "fullfp16": "asimdhp",
}  # fmt: skip
"""The names of features in /proc/cpuinfo, by those of LLVM."""


@functools.cache
def machine() -> dict[str, str]:
    """The system, the processor, its vector features, and the features that torch and MKL use."""
    model, flags = _processor()
    features = " ".join(name for name in _VECTOR if name in flags)
    facts = {
        "machine/system": f"{platform.system()} {platform.machine()}",
        "machine/cpu": model or platform.processor() or "unknown",
        "machine/cores": str(os.cpu_count() or 1),
        "machine/vector_features": features,
        "machine/torch_uses": _kernels(model, features),
        "machine/mkl_cbwr": os.environ.get("MKL_CBWR", ""),
    }
    return {name: value for name, value in facts.items() if value}


def _kernels(*processor: str) -> str:
    """The features that torch uses: from the cache where it is not imported, which takes most of a second."""
    if "torch" in sys.modules:
        return _kernels_by_torch()
    decided_by = (*processor, importlib.metadata.version("torch"), os.environ.get("ATEN_CPU_CAPABILITY"))
    return str(made_of((), f"kernels-{json_hash(decided_by)[:16]}", _kernels_by_torch))


def _kernels_by_torch() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


@functools.cache
def installed(*packages: str) -> dict[str, str]:
    """The versions of packages, without those that are not installed."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _processor() -> tuple[str, set[str]]:
    """The processor's name and feature flags, from Linux or else from LLVM."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _processor_by_llvm()
    values: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        values.setdefault(name.strip(), value.strip())
    flags = values.get("flags") or values.get("Features") or ""
    return values.get("model name", ""), set(flags.split())


def _processor_by_llvm() -> tuple[str, set[str]]:
    from llvmlite import binding  # type: ignore[import-untyped]

    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this processor
        features = {}
    names = (name for name, is_present in features.items() if is_present)
    return binding.get_host_cpu_name(), {_LINUX_NAMES.get(name, name) for name in names}

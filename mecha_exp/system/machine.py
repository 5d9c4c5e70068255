"""The machine that a result was made on: what its processor can do decides how some functions are rounded."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")
_VECTOR = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile", "asimd", "asimdhp", "sve", "sve2", "bf16",
)  # fmt: skip


@functools.cache
def machine() -> dict[str, str]:
    """System, processor, its vector features, and which of them torch uses."""
    model, flags = _processor()
    found = {
        "machine/system": f"{platform.system()} {platform.machine()}",
        "machine/cpu": model or platform.processor() or "unknown",
        "machine/cores": str(os.cpu_count() or 1),
        "machine/vector_features": " ".join(name for name in _VECTOR if name in flags),
        "machine/torch_uses": torch.backends.cpu.get_cpu_capability(),
    }
    return {name: value for name, value in found.items() if value}


def _processor() -> tuple[str, set[str]]:
    """The processor's name and its feature flags, where the system lists them."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", set()
    values: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        values.setdefault(name.strip(), value.strip())
    flags = values.get("flags") or values.get("Features") or ""
    return values.get("model name", ""), set(flags.split())


def available_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

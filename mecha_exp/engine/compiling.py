# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Compiled loops: once a source and machine, kept in memory for the process and on disk for the next ones.

The disk cache is a folder of small source files, with numba's machine code beside them. Files are written
under another name and renamed, so processes may share it; one that cannot be used costs the time to compile.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

CACHE_VARIABLE = "MECHA_EXP_CACHE"
"""Names the folder of compiled loops; `off` keeps none."""

Loop: TypeAlias = Callable[..., None]


class LoopText(NamedTuple):
    """A Python function `loop` in numba's subset, and the types of its parameters."""

    source: str
    signature: str


_log = logging.getLogger(__name__)
_compiling = threading.Lock()
_ALIAS_CHECKS = "--runtime-memory-check-threshold=1024"
"""A loop over many inputs and outputs is vectorized only if LLVM may check that none of them overlap."""


def can_compile() -> bool:
    """Whether numba is there."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def converts_half() -> bool:
    """Whether the processor converts float16 itself, rather than calling a function that may not be there."""
    import llvmlite.binding

    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(llvmlite.binding.get_host_cpu_features().get("f16c"))
    return platform.machine().lower() in ("arm64", "aarch64")


def compiled(text: LoopText) -> Loop | None:
    """A loop as machine code; None, and a line in the log, where that fails."""
    with _compiling:
        return _compiled(text)


def compile_ahead(texts: Iterable[LoopText]) -> None:
    """Begin to compile loops while other things are done."""
    pending = list(dict.fromkeys(texts))
    if pending:
        threading.Thread(target=lambda: [compiled(text) for text in pending], daemon=True).start()


def cache_folder() -> Path | None:
    """Where compiled loops are kept: $MECHA_EXP_CACHE, or in the user's folder for caches."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return None if chosen == "off" else Path(chosen) / "loops"
    try:
        return _user_caches() / "mecha_exp" / "loops"
    except RuntimeError:  # no home
        return None


def _user_caches() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@functools.cache
def _compiled(text: LoopText) -> Loop | None:
    _prepare()
    try:
        folder = cache_folder()
        path = _keep_source(folder, text.source) if folder else None
        if path is not None:
            try:
                return _jit(text, str(path), cache=True)
            except Exception as error:  # whatever a broken file makes pickle, the loader or the system raise
                _log.debug("the compiled loop in %s cannot be used: %s", folder, error)
        return _jit(text, "<fused loop>", cache=False)
    except Exception as error:
        _log.warning("a fused loop cannot be compiled, so it runs eagerly: %s", error)
        return None


def _jit(text: LoopText, filename: str, cache: bool) -> Loop:
    import numba

    namespace: dict[str, Any] = {
        "__name__": __name__
    }  # a module that can be imported, or numba keeps nothing
    exec(compile(text.source, filename, "exec"), namespace)
    make = numba.njit(text.signature, nogil=True, error_model="numpy", cache=cache)
    loop: Loop = make(namespace["loop"])
    return loop


def _keep_source(folder: Path, source: str) -> Path | None:
    """The file of a source in the cache; None where none can be written."""
    path = folder / f"{_version()}-{hashlib.sha256(source.encode()).hexdigest()[:32]}.py"
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == source:
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            file.write(source)
        os.utime(file.name, (0, 0))  # numba compares times, and every process is to write the same one
        Path(file.name).replace(path)
    except OSError as error:
        _log.debug("no compiled loops are kept in %s: %s", folder, error)
        return None
    return path


@functools.cache
def _version() -> str:
    """What besides its source decides what becomes of a loop."""
    import llvmlite
    import numba

    intrinsics = Path(__file__).with_name("intrinsics.py").read_bytes()
    parts = (numba.__version__, llvmlite.__version__, _ALIAS_CHECKS, sys.version, intrinsics)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@functools.cache
def _prepare() -> None:
    import llvmlite.binding

    llvmlite.binding.set_option("mecha_exp", _ALIAS_CHECKS)

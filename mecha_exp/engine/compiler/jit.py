# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Compiled loops: once a source and machine, kept in memory for the process and on disk for the next ones.

On disk they are machine code, see `object_file`; where it cannot, small source files with what numba keeps
beside them. One that cannot be used costs the time to compile.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import platform
import sys
import threading
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from mecha_exp.engine.compiler import object_file
from mecha_exp.engine.compiler.object_file import Loop
from mecha_exp.system.cache import (
    is_private,
    private_folder,
    read_checksummed,
    write_cached,
    write_checksummed,
)

LOOPS = "loops"
"""The folder of compiled loops in the user's cache folder."""


class LoopText(NamedTuple):
    """A Python function `loop(start, count, table)` in numba's subset.

    Attributes:
        source: of the function.
        room: the bytes that it needs for itself.
        order: the integers that it receives.
        row_room: the bytes that it needs beside `room` for each entry of a row.
    """

    source: str
    room: int
    order: tuple[int, ...] = ()
    row_room: int = 0


_log = logging.getLogger(__name__)
_compiling = threading.Lock()


@functools.cache
def can_compile() -> bool:
    """Whether numba is installed."""
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


@functools.cache
def _compiled(text: LoopText) -> Loop | None:
    folder = private_folder(LOOPS)
    try:
        if object_file.is_possible():
            try:
                return _object(text, folder)
            except Exception as error:
                _log.debug("a fused loop is left to numba: %s", error)
        return _by_numba(text, folder)
    except Exception as error:
        _log.warning("a fused loop cannot be compiled, so it runs eagerly: %s", error)
        return None


def _object(text: LoopText, folder: Path | None) -> Loop:
    """A loop that does without numba once it is on disk."""
    path = folder / f"{_name(text)}.o" if folder else None
    code = read_checksummed(path) if path else None
    if code is None:
        code = object_file.build(_function(text, "<fused loop>"))
        if path is not None:
            write_checksummed(path, code)
    return object_file.NativeLoop(code)


def _by_numba(text: LoopText, folder: Path | None) -> Loop:
    """A loop that numba compiles, keeps and calls."""
    import numba

    def jit(filename: str, cache: bool) -> Loop:
        loop: Loop = numba.njit(object_file.SIGNATURE, cache=cache, **object_file.OPTIONS)(
            _function(text, filename)
        )
        return loop

    path = folder / f"{_name(text)}.py" if folder else None
    if path is not None and _is_all_private(path.parent) and write_cached(path, text.source.encode()):
        try:
            return jit(str(path), cache=True)
        except Exception as error:  # whatever a broken file makes pickle, the loader or the system raise
            _log.debug("the compiled loop in %s cannot be used: %s", folder, error)
    return jit("<fused loop>", cache=False)


def _is_all_private(folder: Path) -> bool:
    """Whether only the user can have written what numba reads in a folder."""
    return all(is_private(path.lstat()) for path in folder.rglob("*"))


def _function(text: LoopText, filename: str) -> Loop:
    """The Python function of a loop."""
    # a module that can be imported, or numba keeps nothing
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(text.source, filename, "exec"), namespace)
    loop: Loop = namespace["loop"]
    return loop


def _name(text: LoopText) -> str:
    """The stem of the cache files of a loop."""
    return f"{_version()}-{hashlib.sha256(text.source.encode()).hexdigest()[:32]}"


_FOLDER = Path(__file__).parent
_CALLED = (_FOLDER / "abi.py", *sorted((_FOLDER / "kernels").glob("*.py")))
"""The modules that the source of a loop calls, whose text is part of what a loop is."""


@functools.cache
def _version() -> str:
    """A hash of what decides the machine code of a loop besides its source."""
    from llvmlite import binding

    packages = (metadata.version(name) for name in ("numba", "llvmlite", "torch"))
    versions = (sys.version, *packages, object_file.FORMAT)
    machine = (binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(), platform.machine())
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_"))
    called = [path.read_bytes() for path in _CALLED]
    return hashlib.sha256(repr((versions, machine, settings, called)).encode()).hexdigest()[:12]

# mypy: disable-error-code="import-untyped, no-untyped-call"
"""The machine code of a loop as an object file, which is loaded without numba.

To import numba takes longer than many a merge; a loop needs nothing of it once it is machine code, since all
memory is the caller's. An object that does need more than the C library's `memset` and its like is not kept.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

SIGNATURE = "void(int64, int64, int64)"
"""The signature of every loop: the start and the length of its tile, and the address of its table."""

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Options of numba for every loop: nothing in it is allocated, counted or raised."""

FORMAT = 1
"""The version of object files in the cache: raise it when their interface changes."""

Loop: TypeAlias = Callable[[int, int, int], None]

_LIBRARY = {"memcpy", "memmove", "memset"}
"""The functions that machine code may call, which every process has."""

_BARE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_ENTRY = "mecha_exp_loop"
_NATIVE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
"""How numba has a compiled function called: two places for results, then the arguments; 0 is success."""

_ELF, _SYMBOL_TABLE, _SYMBOL_BYTES = b"\x7fELF\x02\x01", 2, 24


def is_possible() -> bool:
    """Whether the system has the one kind of object file that is understood here."""
    return sys.platform == "linux" and sys.byteorder == "little" and sys.maxsize > 1 << 32


def build(function: Any) -> bytes:
    """The object file of a loop, compiled by numba.

    Raises:
        ValueError: it would need more than the C library to run.
    """
    from llvmlite import binding
    from numba import njit

    bare: Any = njit(SIGNATURE, **{**OPTIONS, **_BARE})(function)
    (compiled,) = bare.overloads.values()
    module = binding.parse_assembly(compiled.library.get_llvm_str())
    module.get_function(compiled.fndesc.llvm_func_name).name = _ENTRY
    code: bytes = _machine().emit_object(module)
    foreign = set(_undefined(code)) - _LIBRARY
    if foreign:
        raise ValueError(f"the loop needs {', '.join(sorted(foreign))}")
    return code


class NativeLoop:
    """The loop in an object file that `build` gave; other threads go on while it runs.

    Attributes:
        address: of its machine code.
        result: the address of the place that it is given for results.
    """

    def __init__(self, code: bytes) -> None:
        from llvmlite import binding

        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._engine = engine  # which owns the code
        self._place = ctypes.c_void_p()
        self.result = ctypes.addressof(self._place)
        self.address: int = engine.get_function_address(_ENTRY)
        self._call = _NATIVE(self.address)

    def __call__(self, start: int, count: int, table: int) -> None:
        if self._call(self.result, self.result, start, count, table):
            raise RuntimeError("a compiled loop failed")


def _machine() -> Any:
    """A target machine. Each engine takes one for its own, and frees it at its end."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )


def _undefined(code: bytes) -> Iterator[str]:
    """The names that an ELF object expects from elsewhere."""
    if not code.startswith(_ELF):
        raise ValueError("not an ELF object")
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQI", code, table + size * n) for n in range(count)]
    for _, kind, _, _, offset, length, names in sections:
        for symbol in range(offset, offset + length, _SYMBOL_BYTES) if kind == _SYMBOL_TABLE else ():
            name, _, _, section = struct.unpack_from("<IBBH", code, symbol)
            if section == 0 and name:
                begin = sections[names][4] + name
                yield code[begin : code.index(b"\0", begin)].decode()

"""The operations that a fused loop knows: to add one is one line of `OPERATIONS`.

An aten operation is written as the loop says it for one element, with {0}, {1}, ... for the operands and {t}
for the type of the result; functions that Python does not have are in `kernels`. It must give
torch's bits for every input, NaN, infinities, denormals and -0.0 included, in the middle of a tile as at its
end; a test tries each of them. So what different kernels round differently is not here: library functions
(exp, sin, pow and sqrt, which MKL does not round to the nearest), fused multiply-adds (lerp, addcmul, add
with alpha), and maximum, which may choose either zero.
"""

from dataclasses import dataclass

import torch

STORED = {
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2: "e5m2",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}
"""The dtypes that a loop reads and writes as stored (`from_...`, `to_...`), and rounds to (`as_...`)."""

NUMBERS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "boolean",
    **dict.fromkeys(STORED, "float32"),  # values that have been rounded, and only to be converted again
}
"""The dtypes that a value in a loop can have, and the types that hold them there."""


def bits_dtype(stored: torch.dtype) -> torch.dtype:
    """The integer dtype that holds the bits of a `STORED` dtype."""
    return torch.int16 if stored.itemsize == 2 else torch.uint8


@dataclass(frozen=True)
class Operation:
    """How an operation is written for one element.

    Attributes:
        text: with {0}, {1}, ... for the operands, {t} for the type of the result.
        converted: to which dtype the operands are converted first: that of the `result`, or the `common` one
            that promotion finds for the operands.
        arity: how many operands there are; an operation with further ones is another operation.
        whole: whether it is for whole numbers and truth values only.
    """

    text: str
    converted: str = "result"
    whole: bool = False

    @property
    def arity(self) -> int:
        return sum(f"{{{place}}}" in self.text for place in range(4))


def _compare(sign: str) -> Operation:
    return Operation(f"{{0}} {sign} {{1}}", converted="common")


def _bitwise(text: str) -> Operation:
    return Operation(text, whole=True)


OPERATIONS = {
    "add": Operation("{0} + {1}"),
    "sub": Operation("{0} - {1}"),
    "rsub": Operation("{1} - {0}"),
    "mul": Operation("{0} * {1}"),
    "div": Operation("{0} / {1}"),
    "neg": Operation("-{0}"),
    "abs": Operation("abs({0})"),
    "sign": Operation("{t}({0} > {t}(0)) - {t}({0} < {t}(0))"),
    "square": Operation("{0} * {0}"),
    "reciprocal": Operation("{t}(1) / {0}"),
    "clamp_min": Operation("{1} if {0} < {1} else {0}"),
    "clamp_max": Operation("{1} if {1} < {0} else {0}"),
    "clamp": Operation("clamped({0}, {1}, {2})"),
    "where": Operation("{1} if {0} else {2}"),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "isnan": Operation("{0} != {0}", converted="common"),
    "logical_and": Operation("{0} and {1}"),
    "logical_or": Operation("{0} or {1}"),
    "logical_not": Operation("not {0}"),
    "logical_xor": Operation("{0} != {1}"),
    "bitwise_and": _bitwise("{0} & {1}"),
    "bitwise_or": _bitwise("{0} | {1}"),
    "bitwise_xor": _bitwise("{0} ^ {1}"),
    "bitwise_not": _bitwise("{0} ^ {t}(-1)"),
    "__rshift__": _bitwise("shifted_right({0}, {1})"),
    "__lshift__": _bitwise("shifted_left({0}, {1})"),
    "bitwise_right_shift": _bitwise("shifted_right({0}, {1})"),
    "bitwise_left_shift": _bitwise("shifted_left({0}, {1})"),
    "bits": Operation("bits({0})", converted="common"),  # view(dtype) of the same size
    "number": Operation("number({0})", converted="common"),  # and back
    "zeros_like": Operation("0"),
    "ones_like": Operation("1"),
    "cast": Operation("{0}"),
}
"""How each aten operation is written; both `x.gt(y)` and `x.gt(1)` are "gt"."""

ROW_OPERATIONS = {
    "row_sum": Operation("{0}"),  # what an entry adds, which `sum_rows` adds up
    "ranks": Operation("{0}"),  # what an entry is ranked by, of which `rank_rows` makes ranks
    "root": Operation("np.sqrt({0})"),
}
"""Operations of methods that work on rows; `primitives.rows` and `primitives.sorting` have them for torch."""


def operation_of(name: str) -> Operation:
    """How an operation of a trace is written."""
    return ROW_OPERATIONS.get(name) or OPERATIONS[name]

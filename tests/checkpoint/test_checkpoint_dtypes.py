"""One table of dtypes: names of the format, of torch, and those that users type."""

import pytest
import torch

from mecha_exp.checkpoint import dtype_name, is_arithmetic, parse_dtype, torch_dtype
from mecha_exp.checkpoint.dtypes import FORMATS, stored_bytes
from mecha_exp.errors import CheckpointError, ConfigError


@pytest.mark.parametrize("name", [name for name, entry in FORMATS.items() if entry.torch is not None])
def test_names_and_torch_dtypes_are_one_to_one(name: str) -> None:
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    assert dtype.itemsize * 8 == FORMATS[name].bits
    assert parse_dtype(name) is parse_dtype(str(dtype)) is dtype


@pytest.mark.parametrize("name", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E5M2FNUZ"])
def test_floating_point_is_merged(name: str) -> None:
    assert is_arithmetic(name)
    assert torch_dtype(name).is_floating_point


@pytest.mark.parametrize("name", ["I64", "U8", "BOOL", "F4", "F6_E3M2", "F8_E8M0", "C64"])
def test_everything_else_is_copied(name: str) -> None:
    assert not is_arithmetic(name)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("float16", torch.float16),
        ("fp16", torch.float16),
        ("F16", torch.float16),
        ("half", torch.float16),
        ("torch.float32", torch.float32),
        ("FP32", torch.float32),
        ("bf16", torch.bfloat16),
        (" bfloat16 ", torch.bfloat16),
        ("fp8_e4m3fn", torch.float8_e4m3fn),
        ("double", torch.float64),
        ("int64", torch.int64),
        ("bool", torch.bool),
    ],
)
def test_a_dtype_has_many_spellings(text: str, dtype: torch.dtype) -> None:
    assert parse_dtype(text) is dtype


def test_an_unknown_spelling_hints_at_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown dtype 'flaot16'\. Did you mean 'float16'"):
        parse_dtype("flaot16")


def test_what_has_no_equivalent_says_so() -> None:
    with pytest.raises(CheckpointError, match="torch has no dtype for F4"):
        torch_dtype("F4")
    with pytest.raises(CheckpointError, match="complex128 cannot be stored"):
        dtype_name(torch.complex128)
    with pytest.raises(CheckpointError, match="unknown dtype 'F33'"):
        is_arithmetic("F33")


def test_sizes_are_exact_for_any_shape() -> None:
    assert stored_bytes("F32", ()) == 4
    assert stored_bytes("F64", (2**40, 2**20)) == 2**63
    assert stored_bytes("F6_E2M3", (4,)) == 3

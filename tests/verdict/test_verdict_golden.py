"""No number and no sentence of a verdict changes unnoticed: see verdict_cases.py."""

import json
from typing import Any

import pytest
from verdict_cases import GOLDEN, concluded


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return concluded()


EXPECTED: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, of in EXPECTED.items() for name in of])
def test_verdicts_are_those_that_were_written(part: str, name: str, now: dict[str, Any]):
    differing = list(differences(now[part][name], EXPECTED[part][name]))
    assert not differing, f"{differing[:5]}: if that is meant, run python tests/verdict/verdict_cases.py"


def test_every_case_is_written(now: dict[str, Any]):
    assert {part: list(of) for part, of in now.items()} == {part: list(of) for part, of in EXPECTED.items()}


def differences(value: Any, expected: Any, place: str = ""):
    """The places at which two values differ by more than rounding."""
    if isinstance(value, dict) and isinstance(expected, dict) and value.keys() == expected.keys():
        for key in value:
            yield from differences(value[key], expected[key], f"{place}/{key}")
    elif isinstance(value, list) and isinstance(expected, list) and len(value) == len(expected):
        for number, (one, other) in enumerate(zip(value, expected, strict=True)):
            yield from differences(one, other, f"{place}/{number}")
    elif isinstance(value, float) and isinstance(expected, float | int):
        if value != pytest.approx(expected, rel=1e-6, abs=1e-9):
            yield place, value, expected
    elif value != expected:
        yield place, value, expected

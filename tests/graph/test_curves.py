"""The presets of block weights are the lists that people share: curves sampled at the blocks."""

import math

import pytest

from mecha_exp.graph.curves import PRESETS, Preset

SD1, SDXL = 25, 19
"""Blocks besides BASE: 12 + 1 + 12 and 9 + 1 + 9."""

STEPS = {
    "WRAP08": "1111000000000000000001111",
    "WRAP12": "1111110000000000000111111",
    "WRAP14": "1111111000000000001111111",
    "WRAP16": "1111111100000000011111111",
    "MID12_50": "00000hhhhhhhhhhhhhh000000",
    "OUT07": "0000000000000000001111111",
    "OUT12": "0000000000000111111111111",
    "OUT12_5": "000000000000h111111111111",
    "RING08_SOFT": "00000h111h00000h111h00000",
    "RING08_5": "0000001111000001111000000",
    "RING10_5": "0000011111000001111100000",
    "RING10_3": "0000001111100011111000000",
    "ALL_A": "0" * 25,
    "ALL_B": "1" * 25,
}
"""The presets that are steps at the blocks of Stable Diffusion 1; h is a half."""

STEPS_SDXL = {
    "WRAP08": "1111000000000001111",
    "WRAP12": "1111110000000111111",
    "OUT07": "0000000000001111111",
    "OUT12": "0000000000111111111",  # published as OUT09
    "OUT12_5": "000000000h111111111",  # published as OUT09_5
    "RING08_SOFT": "00h111h00000h111h00",
    "RING10_5": "0011111000001111100",
    "RING10_3": "0001111100011111000",
}

POINTS = {
    "GRAD_V": {0: 1, 3: 0.75, 6: 0.5, 12: 0, 18: 0.5, 24: 1},
    "GRAD_A": {0: 0, 3: 0.25, 6: 0.5, 12: 1, 18: 0.5, 24: 0},
    "FLAT_25": {0: 0.25, 12: 0.25, 24: 0.25},
    "FLAT_75": {0: 0.75, 12: 0.75, 24: 0.75},
    "SMOOTHSTEP": {0: 0, 6: 5 / 32, 8: 7 / 27, 12: 1 / 2, 18: 27 / 32, 24: 1},
    "SMOOTHSTEP*2": {6: 5 / 16, 12: 1, 18: 5 / 16, 24: 0},
    "SMOOTHSTEP*3": {6: 15 / 32, 8: 7 / 9, 12: 1 / 2, 16: 2 / 9, 24: 1},
    "SMOOTHSTEP*4": {6: 5 / 8, 12: 0, 18: 5 / 8, 24: 0},
    "SMOOTHSTEP/2": {6: 1 / 2, 12: 1, 18: 1 / 2, 24: 0},
    "SMOOTHSTEP/3": {4: 1 / 2, 8: 1, 12: 1 / 2, 16: 0, 24: 1},
    "SMOOTHSTEP/4": {3: 1 / 2, 6: 1, 12: 0, 18: 1, 24: 0},
    "COSINE": {0: 1, 6: (2 + math.sqrt(2)) / 4, 8: 3 / 4, 12: 1 / 2, 16: 1 / 4, 24: 0},
    "TRUE_CUBIC_HERMITE": {0: 0, 6: 149 / 256, 12: 25 / 48, 18: 353 / 768, 24: 1},
    "FAKE_CUBIC_HERMITE": {0: 0, 6: 35 / 64, 12: 1 / 2, 18: 29 / 64, 24: 1},
}
"""Some of the published numbers of the others, by block of Stable Diffusion 1."""

REVERSES = {
    "SMOOTHSTEP": "REVERSE-SMOOTHSTEP",
    "COSINE": "REVERSE_COSINE",
    "TRUE_CUBIC_HERMITE": "TRUE_REVERSE_CUBIC_HERMITE",
    "FAKE_CUBIC_HERMITE": "FAKE_REVERSE_CUBIC_HERMITE",
    **{f"SMOOTHSTEP{end}": f"R_SMOOTHSTEP{end}" for end in ("*2", "*3", "*4", "/2", "/3", "/4")},
}


def sampled(name: str, count: int) -> list[float]:
    return [Preset(name).at(place, count) for place in range(count)]


def steps(text: str) -> list[float]:
    return [{"0": 0.0, "1": 1.0, "h": 0.5}[letter] for letter in text]


def test_every_preset_is_checked_here():
    assert PRESETS.keys() == STEPS.keys() | POINTS.keys() | set(REVERSES.values()) | {"LINEAR"}
    assert len(PRESETS) == 39


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_at_the_published_blocks(name):
    assert sampled(name, SD1) == steps(STEPS[name])
    if name in STEPS_SDXL:
        assert sampled(name, SDXL) == steps(STEPS_SDXL[name])


@pytest.mark.parametrize("name", POINTS)
def test_curves_have_the_published_values(name):
    found = sampled(name, SD1)

    assert {place: found[place] for place in POINTS[name]} == pytest.approx(POINTS[name], abs=1e-12)


def test_linear_is_the_depth_of_lines():
    assert sampled("LINEAR", 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(("name", "reverse"), REVERSES.items())
def test_a_reverse_is_one_minus_the_curve(name, reverse):
    assert sampled(reverse, SD1) == [1 - value for value in sampled(name, SD1)]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("count", [1, 2, 3, 12, 32, 80])
def test_a_preset_fits_any_number_of_blocks(name, count):
    assert all(0 <= value <= 1 for value in sampled(name, count))


@pytest.mark.parametrize("name", PRESETS)
def test_what_lies_in_no_block_is_left_as_it_was_but_for_one_preset(name):
    assert Preset(name).elsewhere == (1 if name == "ALL_B" else 0)

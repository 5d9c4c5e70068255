"""The points of a sweep: grids, lists side by side, samples, one thing at a time, blocks apart."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mecha_exp.errors import ConfigError
from mecha_exp.lab import points as lab
from mecha_exp.lab.points import Axis

ALPHA, K = Axis("alpha", ("0.3", "0.5")), Axis("k", ("0.1", "0.2"))
RANGE = Axis("alpha", low=0.0, high=2.0)


def test_a_grid_is_every_combination_with_the_last_axis_changing_first():
    assert lab.grid([ALPHA, K]) == [{"alpha": a, "k": k} for a in ("0.3", "0.5") for k in ("0.1", "0.2")]


def test_lists_side_by_side():
    assert lab.zipped([ALPHA, K]) == [{"alpha": "0.3", "k": "0.1"}, {"alpha": "0.5", "k": "0.2"}]
    with pytest.raises(ConfigError, match="alpha has 2 values, k has 1 value"):
        lab.zipped([ALPHA, Axis("k", ("0.1",))])


@given(n=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_latin_hypercube_has_one_point_in_each_part_of_a_range(n: int, seed: int):
    points = lab.latin_hypercube([RANGE, K], n, seed)

    parts = sorted(min(int(float(p["alpha"]) / 2.0 * n + 1e-4), n - 1) for p in points)
    assert len({p["alpha"] for p in points}) == n
    assert all(abs(part - number) <= 1 for number, part in enumerate(parts))  # a name has six digits
    assert points == lab.latin_hypercube([RANGE, K], n, seed)


@given(
    low=st.floats(1e-6, 1.0), factor=st.floats(1.001, 1e4), seed=st.integers(0, 9), logarithmic=st.booleans()
)
def test_what_is_drawn_lies_in_the_range(low: float, factor: float, seed: int, logarithmic: bool):
    axis = Axis("alpha", low=low, high=low * factor, logarithmic=logarithmic)

    for point in lab.at_random([axis], 5, seed):
        assert low * (1 - 1e-5) <= float(point["alpha"]) <= low * factor * (1 + 1e-5)


def test_other_seeds_draw_other_points():
    assert lab.at_random([RANGE], 3, seed=0) != lab.at_random([RANGE], 3, seed=1)


def test_one_at_a_time_varies_each_axis_around_the_default():
    assert lab.one_at_a_time([ALPHA, K], {"alpha": "1.0", "k": "0.2"}) == [
        {"alpha": "1.0", "k": "0.2"},
        {"alpha": "0.3", "k": "0.2"},
        {"alpha": "0.5", "k": "0.2"},
        {"alpha": "1.0", "k": "0.1"},
        {"alpha": "1.0", "k": "0.2"},
    ]


def test_blocks_are_left_out_or_merged_alone():
    left_out = lab.blocks_apart(["a", "b"], "leave_one_block_out", "${alpha}")
    alone = lab.blocks_apart(["a", "b"], "only_one_block", "${alpha}")

    assert left_out == [{}, {"++block": "a", "++blocks.a": "0"}, {"++block": "b", "++blocks.b": "0"}]
    assert alone[0] == {"++blocks.default": "0"}
    assert alone[1] == {"++blocks.default": "0", "++block": "a", "++blocks.a": "${alpha}"}


def test_replicates_are_seeds():
    assert lab.replicated([{"alpha": "0.3"}], 7, 2) == [
        {"alpha": "0.3", "seed": "7"},
        {"alpha": "0.3", "seed": "8"},
    ]


def test_points_that_come_to_the_same_are_one():
    points = [{"alpha": "0.30000000000000004"}, {"alpha": "0.3"}, {"alpha": "3e-1"}, {"alpha": "1"}]

    assert lab.unique(points) == [{"alpha": "0.3"}, {"alpha": "1"}]
    assert lab.unique([{"alpha": "1.0", "k": "0.2"}, {"k": "0.2", "alpha": "1"}]) == [
        {"alpha": "1.0", "k": "0.2"}
    ]
    assert len(lab.unique([{"name": "nan"}, {"name": "inf"}, {"name": "1x"}])) == 3


def test_what_is_typed_in_full_is_not_cut():
    assert lab.normalized("0.1234567890123") == "0.1234567890123"
    assert lab.normalized("0.333333333333333") == "0.333333333333333"
    assert lab.normalized("1.0999999999999999") == "1.1"


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_range_of_whole_numbers_gives_each_of_them_and_nothing_else(logarithmic):
    axis = Axis("n", low=1.0, high=8.0, logarithmic=logarithmic, is_integer=True)

    drawn = [axis.at(share / 1000) for share in range(1001)]

    assert sorted(set(drawn)) == [str(number) for number in range(1, 9)]
    assert drawn == sorted(drawn)
    if not logarithmic:
        assert {drawn.count(str(number)) for number in range(1, 9)} <= {124, 125, 126}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_normalizing_changes_no_number_by_more_than_its_last_digits(number: float):
    assert float(lab.normalized(repr(number))) == pytest.approx(number, rel=1e-11)
    assert lab.normalized(lab.normalized(repr(number))) == lab.normalized(repr(number))


def test_the_shares_of_the_machines_are_all_points_once():
    points = [{"alpha": str(i)} for i in range(10)]

    parts = [lab.shared(points, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(p["alpha"] for part in parts for p in part) == sorted(p["alpha"] for p in points)
    with pytest.raises(ConfigError, match=r"sweep.share=4/3: expected a part such as 1/4"):
        lab.shared(points, "4/3")


def test_points_from_a_file(tmp_path: Path):
    (tmp_path / "p.csv").write_text("alpha, k\n0.3,0.1\n0.5,\n")

    assert lab.read_points(tmp_path / "p.csv") == [{"alpha": "0.3", "k": "0.1"}, {"alpha": "0.5"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha\n", "has no points"),
        ("alpha\n0.3,0.1\n", "line 2: more fields than the first line has keys"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str):
    (tmp_path / "p.csv").write_text(text)

    with pytest.raises(ConfigError, match=message):
        lab.read_points(tmp_path / "p.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        lab.read_points(tmp_path / "none.csv")


def test_a_range_is_no_list():
    with pytest.raises(ConfigError, match="alpha: sweep=grid needs values, not a range"):
        lab.grid([RANGE])


def test_listed_points_become_the_texts_of_a_command_line():
    assert lab.listed([{"alpha": 0.5, "recipe": "ties", "vote_sgn": True, "weights": [1, 0.5]}]) == [
        {"alpha": "0.5", "recipe": "ties", "vote_sgn": "true", "weights": "[1,0.5]"}
    ]
    with pytest.raises(ConfigError, match="sweep=points needs points"):
        lab.listed([])

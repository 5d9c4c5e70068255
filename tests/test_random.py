"""Random numbers are a function of (seed, key, stream, element): published vectors, tiles, independence."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mecha_exp import EngineOptions, merge, model, uniform
from mecha_exp.random import philox, philox_on_device, uniforms, uniforms_of_keys

COUNT = 100_000
words = st.integers(0, 2**32 - 1)


def reference_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 as the paper writes it (Salmon et al. 2011), one counter at a time."""
    left0, right0, left1, right1 = counter[1], counter[0], counter[3], counter[2]
    for number in range(10):
        key0 = (key[0] + number * 0x9E3779B9) % 2**32
        key1 = (key[1] + number * 0xBB67AE85) % 2**32
        high0, low0 = divmod(0xD2511F53 * right0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * right1, 2**32)
        right0, left0, right1, left1 = high1 ^ left0 ^ key0, low1, high0 ^ left1 ^ key1, low0
    return right0, left0, right1, left1


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_gives_the_published_vectors(counter, key, expected):
    assert reference_philox(counter, key) == expected  # Random123, kat_vectors


def test_the_first_published_vector_is_ours():
    drawn = philox(np.zeros(1, dtype=np.uint64), 0, (0, 0))

    assert [f"{word:08x}" for word in drawn[0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), words, st.tuples(words, words))
def test_ours_is_the_reference_for_any_counter_and_key(blocks, stream, key):
    drawn = philox(np.array(blocks, dtype=np.uint64), stream, key)

    expected = [reference_philox((block % 2**32, block >> 32, stream, 0), key) for block in blocks]
    assert drawn.dtype == np.uint32
    assert drawn.tolist() == [list(row) for row in expected]


@given(st.integers(0, 5_000), st.integers(0, 300))
def test_any_part_of_a_sequence_is_that_part_of_the_whole(start, length):
    whole = uniforms("layer.weight", 0, 5_300, seed=7, stream=1)

    part = uniforms("layer.weight", start, start + length, seed=7, stream=1)

    assert part.dtype == np.float32
    assert np.array_equal(part, whole[start : start + length])


def test_a_sequence_goes_on_beyond_what_32_bits_count():
    far = 4 * 2**32  # the first element whose block needs the high word

    around = uniforms("w", far - 3, far + 5, seed=0, stream=0)

    assert np.array_equal(around[3:], uniforms("w", far, far + 5, seed=0, stream=0))
    assert not np.array_equal(around[3:], uniforms("w", 0, 5, seed=0, stream=0))


def test_seeds_keys_and_streams_are_independent():
    drawn = {
        (seed, key, stream): uniforms(key, 0, COUNT, seed, stream)
        for seed in (0, 1, 2**40)
        for key in ("a.weight", "b.weight")
        for stream in (0, 1)
    }

    correlations = np.corrcoef(np.stack(list(drawn.values()))) - np.eye(len(drawn))

    assert np.abs(correlations).max() < 6 / math.sqrt(COUNT)


def test_draws_are_uniform_and_uncorrelated():
    drawn = uniforms("layer.weight", 0, COUNT, seed=3, stream=0).astype(np.float64)

    assert 0 <= drawn.min() < 1e-3
    assert 1 - 1e-3 < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 5 / math.sqrt(12 * COUNT)
    assert abs(drawn.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 5 / math.sqrt(COUNT)
    counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
    assert ((counts - COUNT / 100) ** 2 / (COUNT / 100)).sum() < 99 + 5 * math.sqrt(2 * 99)  # chi squared


def test_draws_are_multiples_of_two_to_the_minus_24():
    drawn = uniforms("w", 0, 1_000, seed=0, stream=0)

    assert np.array_equal(drawn * 2**24, np.round(drawn * 2**24))


def test_the_merge_method_draws_for_each_key_whatever_the_tiles():
    state_dict = {"a": torch.zeros(300, 7), "b": torch.ones(300, 7), "c": torch.zeros(())}
    recipe = uniform(model(state_dict), seed=5, stream=2)

    merged = merge(recipe, options=EngineOptions(tile_size=512, workers=2))

    for key, tensor in state_dict.items():
        expected = uniforms(key, 0, tensor.numel(), seed=5, stream=2).reshape(tuple(tensor.shape))
        assert np.array_equal(merged[key].numpy(), expected)
    assert not torch.equal(merged["a"], merged["b"])


@given(first=st.integers(0, 2**40), stream=words, key=st.tuples(words, words))
def test_a_device_draws_the_same_numbers(first, stream, key):
    blocks = np.arange(first, first + 5, dtype=np.uint64)

    there = philox_on_device(torch.from_numpy(blocks.astype(np.int64)), stream, key)

    assert there.tolist() == philox(blocks, stream, key).tolist()


@pytest.mark.parametrize("count", [1, 4, 7, 1000])
def test_draws_for_several_keys_are_those_of_each(count):
    keys = ["layer.1.weight", "layer.1.bias", "other"]
    drawn = uniforms_of_keys(keys, count, seed=5, stream=2)
    assert drawn.dtype == np.float32
    assert drawn.tolist() == [uniforms(key, 0, count, 5, 2).tolist() for key in keys]

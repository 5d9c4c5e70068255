# mypy: disable-error-code="valid-type"
"""Counter-based random numbers: a draw depends on its key, index, seed and stream alone.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is a function from a
counter and a key to four 32-bit words. The key comes from the seed and the tensor's name, the counter from
the element's index and the stream, so that element i is the same whatever the tiles, threads and devices,
and two tensors of one shape never share a mask.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mecha_exp.method_api.decorators import merge_method
from mecha_exp.method_api.parameters import Parameter, Return
from mecha_exp.method_api.state_dict import Tile

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


@merge_method(elementwise=True)
def uniform(
    like: Parameter(torch.Tensor),
    tile: Tile,
    *,
    seed: Parameter(int, ge=0, help="of the draws") = 0,
    stream: Parameter(int, ge=0, help="other draws for the same seed and key: one for each model") = 0,
) -> Return(torch.Tensor, "param"):
    """A draw from [0, 1) for each entry of a tensor: multiples of 2^-24, independent of its values.

    `stream` keeps apart the draws of several models for one key. The experts of a stack share the sequence of
    their key: each begins where the one before it ends, as if the stack were one tensor.
    """
    start, stop = tile.offset + tile.start, tile.offset + tile.stop
    if like.device.type == "cpu":
        return torch.from_numpy(uniforms(tile.key, start, stop, seed, stream)).to(like)
    first = start // 4
    blocks = torch.arange(first, -(-stop // 4), device=like.device)
    words = philox_on_device(blocks, stream, philox_key(tile.key, seed)).view(-1)
    return (words[start - 4 * first : stop - 4 * first] >> 8).to(like) * 2**-24


def uniforms(key: str, start: int, stop: int, seed: int, stream: int) -> NDArray[np.float32]:
    """Draws `start` to `stop` of the sequence that belongs to (seed, key, stream), as float32 in [0, 1)."""
    first = start // 4
    words = philox(np.arange(first, -(-stop // 4), dtype=np.uint64), stream, philox_key(key, seed))
    return _as_floats(words.reshape(-1)[start - 4 * first : stop - 4 * first])


def uniforms_of_keys(keys: Sequence[str], count: int, seed: int, stream: int) -> NDArray[np.float32]:
    """The first `count` draws of several sequences, [keys, count]: bit for bit `uniforms` of each."""
    words = np.array([philox_key(key, seed) for key in keys], dtype=np.uint64)
    blocks = np.tile(np.arange(-(-count // 4), dtype=np.uint64), (len(keys), 1))
    drawn = philox(blocks, stream, (words[:, :1], words[:, 1:])).reshape(len(keys), -1)
    return _as_floats(drawn[:, :count])


def _as_floats(drawn: NDArray[np.uint32]) -> NDArray[np.float32]:
    draws: NDArray[np.float32] = (drawn >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
    return draws


def philox_key(key: str, seed: int) -> tuple[int, int]:
    """The two words that the draws for a tensor's name are made from."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(
    blocks: NDArray[np.uint64], stream: int, key: tuple[int | NDArray[np.uint64], int | NDArray[np.uint64]]
) -> NDArray[np.uint32]:
    """Philox4x32-10 of the counters (block low, block high, stream, 0), as an array [..., 4].

    The words of the key are numbers, or arrays that broadcast with the blocks.
    """
    c0, c1 = blocks & _LOW, blocks >> _WORD
    c2, c3 = np.full_like(blocks, stream), np.zeros_like(blocks)
    k0: Any = key[0]
    k1: Any = key[1]
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _WORD) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _WORD) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def philox_on_device(blocks: torch.Tensor, stream: int, key: tuple[int, int]) -> torch.Tensor:
    """`philox` by torch, where the counters are: int64 numbers, since few devices have larger ones unsigned.

    A product wraps to the same 64 bits; a shift brings copies of the sign, which are masked away.
    """
    low = int(_LOW)
    m0, m1 = map(int, _MULTIPLIERS)
    c0, c1 = blocks & low, blocks >> 32
    c2, c3 = torch.full_like(blocks, stream), torch.zeros_like(blocks)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32 & low) ^ c1 ^ k0,
            product1 & low,
            (product0 >> 32 & low) ^ c3 ^ k1,
            product0 & low,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & low, (k1 + _KEY_STEPS[1]) & low
    return torch.stack([c0, c1, c2, c3], 1)

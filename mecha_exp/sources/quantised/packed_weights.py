"""GPTQ and AWQ: whole numbers of a few bits, packed into words, with a scale and a zero for each group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mecha_exp.errors import CheckpointError
from mecha_exp.numbers import is_whole
from mecha_exp.sources.quantised.tensor import QuantisedTensor
from mecha_exp.sources.source import Source
from mecha_exp.system.byte_cache import ByteCache

WORD = 32
"""The bits of a packed word."""

AWQ_BITS = 4
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in its word, from the lowest bits on, of each of eight neighbouring columns of AWQ's gemm."""


class _TransposedTensor(QuantisedTensor):
    """(code - zero) * scale of a weight [out, in] whose tensors are stored as [in or groups, out].

    A row of the weight is a column of what is stored, so the stored tensors are held whole while they are
    used: half a byte for each number of four bits.
    """

    def __init__(self, source: Source, module: str, names: tuple[str, ...], cache: ByteCache) -> None:
        self._source, self._module, self._cache = source, module, cache
        present = [name for name in names if f"{module}.{name}" in source]
        for name in ("qweight", "qzeros", "scales"):
            if name not in present:
                raise CheckpointError(f"{module}.{name} is missing")
        self.keys = tuple(f"{module}.{name}" for name in present)
        shapes = {name: source.info(f"{module}.{name}").shape for name in present}
        if any(len(shapes[name]) != 2 for name in ("qweight", "qzeros", "scales")):
            raise CheckpointError(f"{module}.qweight, qzeros and scales are not matrices")
        self._shapes = shapes

    def decode(self, start: int, stop: int) -> Tensor:
        columns = self.shape[1]
        first, last = start // columns, -(-stop // columns)
        stored = self._cache.get(self._module, lambda: {key: self._source.read(key) for key in self.keys})
        rows = self._rows({key.rpartition(".")[2]: value for key, value in stored.items()}, first, last)
        return rows.reshape(-1)[start - first * columns : stop - first * columns]

    def _rows(self, stored: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Some rows of the weight, [last - first, in]."""
        raise NotImplementedError

    def _check(self, **expected: tuple[int, int]) -> None:
        for name, shape in expected.items():
            if self._shapes[name] != shape:
                raise CheckpointError(
                    f"{self._module}.{name} is {list(self._shapes[name])} instead of {list(shape)}"
                )


class GptqTensor(_TransposedTensor):
    """GPTQ: (code - zero) * scale, with codes of 2, 4 or 8 bits.

    The codes of a column follow each other in words of 32 bits from the lowest bits on. `g_idx` says the
    group of each input. The first version of the format (`checkpoint_format: gptq`) stores zero - 1, modulo
    2^bits; the second (`gptq_v2`) stores zero.

    Source: AutoGPTQ, `qlinear_cuda.py`, and GPTQModel.

    Args:
        config: the `quantization_config`.
    """

    def __init__(self, source: Source, module: str, config: Mapping[str, Any], cache: ByteCache) -> None:
        super().__init__(source, module, ("qweight", "qzeros", "scales", "g_idx"), cache)
        version = config.get("checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise CheckpointError(f"its checkpoint_format is {version!r}")
        self._added = 1 if version == "gptq" else 0
        groups, out = self._shapes["scales"]
        self._bits = WORD * self._shapes["qzeros"][1] // max(out, 1)
        if self._bits not in (2, 4, 8):
            raise CheckpointError(f"{module} has codes of {self._bits} bits, and 2, 4 and 8 can be read")
        inputs = self._shapes["qweight"][0] * WORD // self._bits
        self._check(qweight=(inputs * self._bits // WORD, out), qzeros=(groups, out * self._bits // WORD))
        self.shape = (out, inputs)
        self._group_size = _group_size(config, inputs)
        if "g_idx" in self._shapes:
            if self._shapes["g_idx"] != (inputs,):
                raise CheckpointError(f"{module}.g_idx does not have {inputs} entries")
        elif self._group_size is None or -(-inputs // self._group_size) != groups:
            raise CheckpointError(f"{module} has no g_idx, and {groups} groups are not those of config.json")

    def _rows(self, stored: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        bits, per_word = self._bits, WORD // self._bits
        shifts, mask = torch.arange(0, WORD, bits), (1 << bits) - 1
        words = stored["qweight"][:, first:last]
        codes = (words[:, None, :] >> shifts[:, None] & mask).reshape(self.shape[1], last - first)
        low, high = first // per_word, -(-last // per_word)
        zeros = (stored["qzeros"][:, low:high, None] >> shifts & mask).reshape(len(stored["qzeros"]), -1)
        zeros = (zeros[:, first - low * per_word :][:, : last - first] + self._added) & mask
        group = self._groups(stored)
        scales = stored["scales"][:, first:last].float()
        return ((codes - zeros[group]).float() * scales[group]).T

    def _groups(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The group of each input."""
        if "g_idx" not in stored:
            return torch.arange(self.shape[1]) // (self._group_size or 1)
        group = stored["g_idx"].long()
        if bool((group < 0).any() | (group >= self._shapes["scales"][0]).any()):
            raise CheckpointError(
                f"{self._source.name}: {self._module}.g_idx names groups that do not exist."
            )
        return group


class AwqTensor(_TransposedTensor):
    """AWQ in its `gemm` layout: (code - zero) * scale, with codes of 4 bits.

    A word holds eight neighbouring outputs of one input, in the order of `AWQ_PLACES`.

    Source: AutoAWQ, `awq/modules/linear/gemm.py`.

    Args:
        config: the `quantization_config`.
    """

    def __init__(self, source: Source, module: str, config: Mapping[str, Any], cache: ByteCache) -> None:
        super().__init__(source, module, ("qweight", "qzeros", "scales"), cache)
        version, bits = str(config.get("version", "gemm")).lower(), config.get("bits", config.get("w_bit"))
        if version != "gemm" or bits != AWQ_BITS:
            raise CheckpointError(
                f"it is version {version!r} with {bits} bits, and 'gemm' with 4 can be read"
            )
        inputs, groups = self._shapes["qweight"][0], self._shapes["scales"][0]
        self.shape = (self._shapes["scales"][1], inputs)
        words = self.shape[0] * AWQ_BITS // WORD
        self._check(qweight=(inputs, words), qzeros=(groups, words))
        self._group_size = _group_size(config, inputs) or 0
        if not self._group_size or -(-inputs // self._group_size) != groups:
            raise CheckpointError(f"{module} has {groups} groups, which are not those of config.json")

    def _rows(self, stored: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        per_word = WORD // AWQ_BITS
        low, high = first // per_word, -(-last // per_word)
        shifts = torch.tensor(AWQ_PLACES) * AWQ_BITS

        def unpacked(words: Tensor) -> Tensor:
            codes = (words[:, low:high, None] >> shifts & 15).flatten(1)
            return codes[:, first - low * per_word :][:, : last - first]

        group = torch.arange(self.shape[1]) // self._group_size
        scales = stored["scales"][:, first:last].float()
        codes, zeros = unpacked(stored["qweight"]), unpacked(stored["qzeros"])
        return ((codes - zeros[group]).float() * scales[group]).T


def _group_size(config: Mapping[str, Any], inputs: int) -> int | None:
    """The inputs of a group by the configuration; -1 there stands for all."""
    size = config.get("group_size", config.get("q_group_size"))
    if not is_whole(size, least=-1) or size == 0:
        return None
    return inputs if size == -1 else size

"""One kind of statistics in a file, read under the keys of the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from mecha_exp.architectures import OUTPUTS
from mecha_exp.checkpoint import TensorInfo, is_arithmetic
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.errors import CheckpointError, counted, some
from mecha_exp.sources.source import Source, SourceView
from mecha_exp.sources.statistics.checks import check_call
from mecha_exp.sources.statistics.header import (
    ACTIVATIONS,
    FEW_EXAMPLES,
    FISHER,
    GRADIENT,
    GRAM,
    INPUTS_FIRST,
    MASK,
    OF_ENTRIES,
    SCALE,
    StatisticsHeader,
)

_EFFECTS = {MASK: "stay the base's", ACTIVATIONS: "their units keep their places"}
"""The effect on a merge at keys without some kinds of statistics."""


class StatisticsSource(SourceView):
    """One kind of statistics under the keys of the model.

    Fisher information and masks are models of their own: zeros stand for what was not measured. Of other
    kinds there are only the keys that were measured.

    Attributes:
        header: what the statistics are of.
        kind: which are seen.
        unmeasured: the keys of the model without it.
        fitting: calls that the statistics were found to be right for, as `check_call` knows them.

    Raises:
        CheckpointError: the file does not hold this kind.
    """

    check = staticmethod(check_call)

    def __init__(self, original: Source, kind: str) -> None:
        super().__init__(original)
        self.header = StatisticsHeader.of(original)
        self.kind = kind
        if kind not in self.header.kinds:
            raise CheckpointError(
                f"{original.name} holds {' and '.join(self.header.kinds)} of {self.header.model}, and not "
                f"{kind}. Calibrate with kind={kind}."
            )
        start = f"{kind}/"
        self._measured = {
            key.removeprefix(start): key
            for key in original.keys()
            if key.startswith(start)
            and original.info(key).nbytes  # a layer that no example reaches has no rows
        }
        self._zeros = {
            key: TensorInfo.made(dtype, tuple(shape))
            for key, (dtype, shape) in self.header.unmeasured.get(kind, {}).items()
        }
        self.unmeasured = tuple(self._zeros)
        self.fitting: set[tuple[object, ...]] = set()

    def keys(self) -> Collection[str]:
        return (self._measured | self._zeros).keys() if self.kind in OF_ENTRIES else self._measured.keys()

    def info(self, key: str) -> TensorInfo:
        if key in self._measured:
            return self._original.info(self._measured[key])
        if key in self.keys():
            return self._zeros[key]
        raise self._unknown(key)

    def notes(self, keys: Collection[str]) -> Iterator[str]:
        """Say at how many keys there are none, and where there are too few examples."""
        without = [key for key in keys if key in self._zeros and is_arithmetic(self._zeros[key].dtype)]
        if without:
            effect = _EFFECTS.get(self.kind, "get the mean of the models")
            yield (
                f"{len(without)} of {counted(len(keys), 'key')} have no {self.kind} and {effect}: "
                f"{some(without, 3)}"
            )
        of_data = self.kind in (FISHER, GRAM, MASK) and SCALE not in self.header.settings
        if of_data and self.header.count < FEW_EXAMPLES:  # DF-Merge measures few for each of many scales
            yield f"{self.kind} of only {counted(self.header.count, 'example')}. A few hundred tell more."
        if few := self._short_of_rows():
            key, rows, inputs = few[0]
            matrices = counted(len(few), "Gram matrix is", "Gram matrices are")
            layers = "its layer has" if len(few) == 1 else "their layers have"
            yield (
                f"{matrices} of fewer rows than {layers} inputs ('{key}': {rows:,} "
                f"rows, {inputs:,} inputs). More examples would tell more."
            )

    def require_fit(self, model: Source) -> None:
        """Check that the tensors are of the keys of the model, in its shapes.

        Raises:
            CheckpointError: one is not: another program has written the file.
        """
        keys = set(model.keys())
        for key, name in self._measured.items():
            info, of = self._original.info(name), key.removesuffix(INPUTS_FIRST).removesuffix(OUTPUTS)
            if (
                of in keys
                and info.dtype == "F32"
                and info.shape == self._expected(key, info.shape, model.info(of).shape)
            ):
                continue
            raise CheckpointError(
                f"{self.name}: '{name}', {info.dtype} {list(info.shape)}, is not what calibrate writes for "
                f"{self.header.model}. Calibrate again."
            )

    def require_same_examples(self, other: StatisticsSource) -> None:
        """Check that the activations of another model are of the same positions of the same examples.

        Raises:
            CheckpointError: they are not.
        """
        for what, one, two in self._compared(other):
            if one != two:
                raise CheckpointError(
                    f"{self.name} and {other.name} hold activations of different examples: their {what} are "
                    f"{one} and {two}. Calibrate both models with the same data, count, order and seed."
                )

    def _compared(self, other: StatisticsSource) -> Iterator[tuple[str, object, object]]:
        """The facts that two files must share: the name of each fact, and the value in either file."""
        one, two = self.header, other.header
        has_hash = one.data_sha256 or two.data_sha256
        yield (
            ("data", one.data, two.data)
            if not has_hash
            else ("hashes of the data", one.data_sha256, two.data_sha256)
        )
        for name in ("count", "seed", "settings", "code"):
            yield name, getattr(one, name), getattr(two, name)
        yield "layers", sorted(self._measured), sorted(other._measured)
        for name in self._measured.values():
            yield f"rows of '{name}'", one.rows.get(name), two.rows.get(name)
            yield f"shapes of '{name}'", self._original.info(name).shape, other._original.info(name).shape

    def _expected(self, key: str, stored_shape: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a statistic of a weight; `stored_shape` says how many rows there are."""
        if self.kind in OF_ENTRIES:
            return shape
        if self.kind == ACTIVATIONS:
            return (*stored_shape[:1], shape[not key.endswith(OUTPUTS)])
        if self.kind == GRADIENT:
            return (1,)
        inputs = shape[0] if key.endswith(INPUTS_FIRST) else math.prod(shape[1:])
        return (inputs, inputs) if self.kind == GRAM else (inputs,)

    def _short_of_rows(self) -> list[tuple[str, int, int]]:
        """The Gram matrices of fewer rows than inputs: key, rows and inputs."""
        if self.kind != GRAM:
            return []
        sizes = {key: self.info(key).shape[-1] for key in self.keys()}
        return [
            (key, rows, sizes[key])
            for key, rows in self.header.rows.items()
            if key in sizes and rows < sizes[key]
        ]

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        if key in self._measured:
            self._original.read_bytes_into(self._measured[key], start, view)
        else:
            view[:] = bytes(len(view))

    def region(self, key: str) -> FileRegion | None:
        return self._original.region(self._measured[key]) if key in self._measured else None

"""The plan of one key: its program, its outputs, and its share of numbers of the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from mecha_exp.checkpoint import TensorInfo
from mecha_exp.engine.devices import CPU
from mecha_exp.engine.ir.model_values import ModelValue
from mecha_exp.engine.ir.program import DeferredCall, Pass, Program
from mecha_exp.engine.options import EngineOptions
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.method_api.state_dict import Tile

SMALL_KEY = 1 << 14
"""The largest number of elements of a key that costs Python more than arithmetic.

A torch operation on so many elements takes a few microseconds, about as long as calling it.
"""


@dataclass(frozen=True)
class Output:
    """An output of a job at one key: `root` is the index among the roots of the key's program."""

    job: int
    root: int
    dtype: str


@dataclass(frozen=True, eq=False)
class Structure:
    """What is done with a key, but for its name: a model has many keys and few structures.

    Attributes:
        shape: of the tensor.
        program: computes the outputs; None for integers and booleans, which are copied from the first input.
        stored: how each input that has the key stores it; the offset is that of some key of the structure.
        outputs: the jobs' outputs among the roots of the program.
        statistics: (job, input, root): the root is the `moments` of the job's result and the input.
        copies: (job, first input, dtype) of copied keys, which is a model or what a method gives.
        scales: (job, root of the scale, root of the `moments` of what is stored and what was merged) of the
            jobs that quantise the key.
        experts: how many experts are stacked in the key, which the program computes one by one; None where it
            computes the key as a whole.
    """

    shape: tuple[int, ...]
    program: Program | None
    stored: Mapping[ModelNode, TensorInfo]
    outputs: tuple[Output, ...] = ()
    statistics: tuple[tuple[int, ModelNode, int], ...] = ()
    copies: tuple[tuple[int, ModelNode | DeferredCall, str], ...] = ()
    scales: tuple[tuple[int, int, int], ...] = ()
    experts: int | None = None

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def deferred_calls(self) -> list[DeferredCall]:
        """The calls of methods that ask for other keys."""
        computed = self.program.deferred_calls if self.program else []
        return [*computed, *(node for _, node, _ in self.copies if isinstance(node, DeferredCall))]

    @cached_property
    def tensors(self) -> tuple[tuple[int, tuple[str, tuple[int, ...]]], ...]:
        """(job, (dtype, shape)) of what outputs have of a key."""
        dtypes = [(output.job, output.dtype) for output in self.outputs]
        dtypes += [(job, dtype) for job, _, dtype in self.copies]
        return tuple((job, (dtype, self.shape)) for job, dtype in dtypes)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what the program computes at a time: of the key, or of one expert."""
        return self.shape if self.experts is None else self.shape[1:]

    @cached_property
    def is_small(self) -> bool:
        """Whether a key, or one of its experts, is more work for the interpreter than for the processor."""
        has_few = math.prod(self.part_shape) <= SMALL_KEY
        return self.program is not None and has_few and not self.own_bytes and not self.deferred_calls

    def device(self, options: EngineOptions) -> str:
        """Where it is computed: small keys by the processor, which a GPU would take longer to ask for."""
        return CPU if self.is_small else options.device

    @cached_property
    def jobs(self) -> frozenset[int]:
        """The jobs with outputs or statistics."""
        outputs = {output.job for output in self.outputs}
        return frozenset(outputs | {job for job, *_ in (*self.copies, *self.statistics)})

    @cached_property
    def quantised_by(self) -> frozenset[int]:
        """The jobs that quantise it."""
        return frozenset(job for job, _, _ in self.scales)

    @property
    def is_used(self) -> bool:
        """Whether there is something to be done."""
        return bool(self.numel and (self.outputs or self.copies or self.statistics))

    @cached_property
    def own_bytes(self) -> int:
        """The bytes of the whole tensors of a key without what methods read of others."""
        if self.program is None:
            return 0
        return self.program.whole_elements(self.part_shape) * self.program.dtype.itemsize

    @cached_property
    def bytes_read(self) -> int:
        """How many bytes are read for one key, unless a sample misses its target; see `Pass.is_full`."""
        if self.program is None:
            return sum(info.nbytes for info in self.stored.values()) if self.copies else 0
        return sum(map(self.bytes_of_pass, self.program.full_passes))

    def bytes_of_pass(self, pass_: Pass) -> int:
        """How many bytes of a key one pass reads."""
        return sum(self.stored[model].nbytes for model in pass_.models)

    def reads(self, model: ModelNode) -> bool:
        """Whether the key of a model is read. What methods read of other keys does not count."""
        if self.program is None:
            return any(model == source for _, source, _ in self.copies)
        return any(model in pass_.models for pass_ in self.program.full_passes)

    def roots_of(self, job: int) -> tuple[int, ...]:
        """The roots of the program that belong to a job: its outputs and their statistics."""
        statistics = [root for j, _, root in self.statistics if j == job]
        scales = [root for j, *roots in self.scales if j == job for root in roots]
        return (*(output.root for output in self.outputs if output.job == job), *statistics, *scales)


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """The plan of one key: its name, and what is done with it."""

    key: str
    structure: Structure

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.structure.shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.structure.numel

    @property
    def program(self) -> Program | None:
        """What computes its outputs; None where it is copied."""
        return self.structure.program

    @property
    def experts(self) -> int | None:
        """How many experts it holds that are computed one by one, or None."""
        return self.structure.experts

    @property
    def parts(self) -> list[Tile]:
        """What the program computes at a time: all of the key, or all of each expert."""
        places: Iterable[int | None] = (None,) if self.experts is None else range(self.experts)
        shape = self.structure.part_shape
        return [Tile(self.key, 0, math.prod(shape), shape, place) for place in places]


@dataclass(frozen=True, eq=False)
class Trip:
    """One more trip over the data, which finds numbers of the whole model.

    Attributes:
        values: the numbers.
        keys: the keys that count, with what each adds to the numbers.
        sample: likewise over a sample of the data, which tells where to look for the entries of a rank; empty
            where all numbers are sums.
        again: likewise for the entries of a rank that were not found where the sample said.
        counts: of each number how many elements there are.
    """

    values: tuple[ModelValue, ...]
    keys: tuple[KeyPlan, ...]
    sample: tuple[KeyPlan, ...]
    again: tuple[KeyPlan, ...]
    counts: Mapping[ModelValue, int]

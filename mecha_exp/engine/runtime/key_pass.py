"""One pass over one key, tile by tile: read, compute - fused or eagerly -, accumulate, write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count

import numpy as np
import torch

from mecha_exp.checkpoint import round_to, torch_dtype
from mecha_exp.engine.devices import CPU
from mecha_exp.engine.ir.calls import Extent
from mecha_exp.engine.ir.interpreter import accumulate, check_count, evaluate
from mecha_exp.engine.ir.order_statistic import Span, entries_of
from mecha_exp.engine.ir.program import Pass
from mecha_exp.engine.ir.reductions import WIDE_COLUMNS, Accumulator, block_of, is_by_entry
from mecha_exp.engine.planner.keys.key_plan import KeyPlan, Output
from mecha_exp.engine.runtime.buffers import Buffer, Scratch, widen
from mecha_exp.engine.runtime.context import MergeContext
from mecha_exp.engine.runtime.kernel_call import KernelCall, StreamLaunch, kernel_call, stream_launch
from mecha_exp.engine.runtime.overflow import count_lost, overflows_from, saturates, unify_nan
from mecha_exp.errors import MergeError, counted
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node
from mecha_exp.method_api.state_dict import Tile

STREAMED_TILE = 1 << 17
"""Elements of a tile that is streamed, at most: tiles of two inputs and an output stay in the second cache.

From 1 << 16 to 1 << 20 a SLERP of two differed by less than it did from run to run.
"""

TILE_OF_ROWS = 1 << 17
"""Elements of a tile that torch computes by rows on the processor, at most.

Larger intermediate results are given back to the system after every operation and fetched again page by page:
with tiles of 1 << 19 that took a fifth of the processor time of Arcee fusion.
"""

LOOKED_AT = 1 << 12
"""Elements that tell mostly that a key is not too small for its output: few, since they take Python."""

STREAMED_TOGETHER = 1 << 21
"""Elements that a worker streams at a time: calls of Python are few then."""


class KeyPass:
    """A pass over a key, or over an expert in it, tile by tile.

    `tiles` gives the tiles, and `run` does one of them, in any order and from any thread.

    Attributes:
        values: the values of the program so far, by node; the pass fills in those that it keeps whole.
        accumulators: those of the reductions of the pass, which it adds to.
        spans: the parts of the key that a pass over a sample goes through.
        read_again: the inputs that may stay on the device, for passes after this one.
    """

    def __init__(
        self,
        context: MergeContext,
        key: KeyPlan,
        part: Tile,
        pass_: Pass,
        values: dict[Node, torch.Tensor],
        accumulators: Mapping[MergeNode, Accumulator],
        spans: Sequence[Span] = (),
        read_again: frozenset[ModelNode] = frozenset(),
    ) -> None:
        assert key.program is not None
        spec = context.kernels.of(key.structure, pass_)
        self._context, self._plan = context, context.plan
        self._part, self._pass, self._spec = part, pass_, spec
        self._program = key.program
        self._dtype = key.program.dtype
        self._device = key.structure.device(context.plan.options)
        self._values, self._accumulators, self._spans = values, accumulators, spans
        self._checked = context.plan.options.on_nonfinite == "error" and not pass_.sampled
        self._columns = pass_.columns(part.shape)
        self._call = kernel_call(spec, key.key, self._columns, values, accumulators)
        self._launch = stream_launch(context, key.key, self._call) if self._call else None
        self._length = self._tile_length()
        self._place = (key.key, part.expert)
        self._small = self._small_values()
        self._there = context.residence.of(self._place) if self._device != CPU else {}
        self._read_again = read_again if not pass_.sampled or self._may_stay() else frozenset()

    @property
    def block(self) -> int:
        """The number of elements that the boundaries of tiles are multiples of."""
        return block_of(self._columns, bool(self._pass.reductions))

    def tiles(self) -> list[Tile]:
        """The ranges that workers take at a time, in order: a tile, or several where they need no Python."""
        size = self._length * (max(1, STREAMED_TOGETHER // self._length) if self._launch else 1)
        length = self._length if self._pass.sampled else self._part.stop
        return [
            replace(self._part, start=start, stop=min(start + size, length))
            for start in range(0, length, size)
        ]

    def _tile_length(self) -> int:
        """The elements of a tile; a sample is a tile of its own."""
        if self._pass.sampled:
            return sum(stop - start for start, stop in self._spans)
        block = self.block
        if self._columns > WIDE_COLUMNS:
            return block
        size = self._plan.options.tile_elements
        if self._launch:
            size = min(size, STREAMED_TILE)
        elif self._pass.by_rows and self._device == CPU:
            size = min(size, TILE_OF_ROWS)
        return -(-max(size, block) // block) * block

    def _may_stay(self) -> bool:
        """Whether the inputs of a sample are read whole, and stay on the device for the passes after it.

        They are read in one piece then, not in hundreds, and only once.
        """
        nbytes = self._part.stop * sum(dtype.itemsize for dtype in self._spec.stored.values())
        is_one_tile = self._part.stop <= self._plan.options.tile_elements
        return self._device != CPU and is_one_tile and self._context.residence.has_room(nbytes)

    def run(self, tile: Tile, scratch: Scratch) -> None:
        """Compute a tile, or several together, and write the results."""
        if self._launch:
            self._stream(self._launch, tile, scratch)
        else:
            self._run_tile(tile, scratch)
        self._context.progress(tile.key, (tile.stop - tile.start) * self._spec.item_bytes)

    def _stream(self, launch: StreamLaunch, tile: Tile, scratch: Scratch) -> None:
        """Stream several tiles; those that the stream kernel leaves to Python are computed one by one."""
        start = tile.start
        while start < tile.stop:
            length = self._length
            if self._may_be_too_small():
                if start == tile.start:
                    length = min(length, self.block * max(1, LOOKED_AT // self.block))
            else:
                start += launch.run(replace(tile, start=start), length, scratch)
            if start < tile.stop:
                stop = min(start + length, tile.stop)
                self._run_tile(replace(tile, start=start, stop=stop), scratch)
                start = stop

    def _may_be_too_small(self) -> bool:
        """Whether all values of an output so far are too small for its dtype."""
        peaks, key = self._context.stats.peaks, self._part.key
        return any(peaks.get((output.job, key), 0.0) < least for output, least in self._spec.least.items())

    def _run_tile(self, tile: Tile, scratch: Scratch) -> None:
        if self._call is not None:
            values, peaks = self._run_kernel(self._call, tile, scratch)
        else:
            values, peaks = self._run_methods(tile, scratch), {}
        for node in self._pass.kept:
            if node in self._values:
                self._values[node].view(-1)[tile.start : tile.stop] = values[node]
        for node, outputs in self._spec.outputs:
            self._write(node, outputs, values.get(node), peaks.get(node), tile, scratch)

    # fused

    def _run_kernel(
        self, call: KernelCall, tile: Tile, scratch: Scratch
    ) -> tuple[dict[Node, torch.Tensor], dict[Node, float]]:
        trace, early = call.trace, self._early_inputs(call, tile, scratch)
        inputs = [
            Buffer.of(early[node].contiguous())
            if node in early
            else self._read_as(dtype, node, index, tile, scratch)
            for index, (node, dtype) in enumerate(zip(trace.inputs, call.read, strict=True))
        ]
        outputs = call.output_buffers(tile.stop - tile.start, scratch)
        peaks = call.run(tile, inputs, outputs, scratch)
        for node, buffer, peak in zip(trace.inputs, inputs, peaks, strict=False):
            self._check(node, buffer.tensor, peak, tile)
        nodes = [node for node, _ in trace.outputs]
        values = {node: buffer.tensor for node, buffer in zip(nodes, outputs, strict=True) if buffer}
        by_block = [node for node, _ in self._pass.reductions if not is_by_entry(node)]
        if by_block:
            self._accumulate(by_block, {**self._values, **values}, tile)
        return values, dict(zip(nodes, peaks[len(inputs) :], strict=True))

    def _early_inputs(self, call: KernelCall, tile: Tile, scratch: Scratch) -> dict[Node, torch.Tensor]:
        """The inputs of the loop that torch computes, in memory apart from that of its other inputs."""
        kernel = call.kernel
        if not kernel.early:
            return {}
        places = (("early", number) for number in count())
        values = self._evaluated(kernel.early, places, tile, scratch)
        return {node: values[node] for node in kernel.backend.by_torch}

    def _read_as(self, dtype: torch.dtype, node: Node, place: int, tile: Tile, scratch: Scratch) -> Buffer:
        """A tile in the dtype that the loop wants, which is the stored one or that of the arithmetic."""
        if dtype is self._dtype or not isinstance(node, ModelNode):
            return self._read(node, ("input", place), tile, scratch)
        return self._read_stored(node, ("input", place), tile, scratch)

    # eager

    def _run_methods(self, tile: Tile, scratch: Scratch) -> dict[Node, torch.Tensor]:
        """Every value of the pass for one tile, which is added to the reductions."""
        values = self._values_of(tile, scratch)
        self._accumulate([node for node, _ in self._pass.reductions], values, tile)
        return values

    def _values_of(self, tile: Tile, scratch: Scratch) -> dict[Node, torch.Tensor]:
        """Every value of the pass for one tile, flat; small values as they are."""
        return self._evaluated(self._pass.nodes, (("input", number) for number in count()), tile, scratch)

    def _evaluated(
        self, nodes: Sequence[Node], places: Iterator[object], tile: Tile, scratch: Scratch
    ) -> dict[Node, torch.Tensor]:
        """The values of nodes for one tile; `places` names the memory of each leaf."""

        leaves = {
            node: self._read_here(node, next(places), tile, scratch)
            for node in nodes
            if node not in self._program.tile_calls
        }
        self._check_all(leaves, tile)

        def flat(node: MergeNode, result: torch.Tensor) -> torch.Tensor:
            check_count(node, result, tile, node.method.kind.value)
            return result.reshape(-1).to(self._device, self._dtype)

        calls = self._program.tile_calls
        return evaluate(nodes, calls, tile, leaves.__getitem__, flat, {**self._values, **self._small})

    def _small_values(self) -> dict[Node, torch.Tensor]:
        """The small values that are known before the pass, on the device."""
        if self._device == CPU:
            return {}
        small = {n: v for n, v in self._values.items() if self._program.extents[n] is Extent.SMALL}
        return {node: value.to(self._device) for node, value in small.items()}

    def _read_here(self, node: Node, place: object, tile: Tile, scratch: Scratch) -> torch.Tensor:
        """A tile on the device, in the dtype of the arithmetic."""
        if self._device == CPU:
            return self._read(node, place, tile, scratch).tensor
        if not isinstance(node, ModelNode):
            return self._cut(node, tile).to(self._device, non_blocking=True)
        whole = (0, self._part.stop)
        stays = node in self._read_again or (node, *whole) in self._there
        if self._pass.sampled and stays:
            return self._arrived(node, place, [whole], tile, scratch)[self._sampled].to(self._dtype)
        return self._arrived(node, place, self._places(tile), tile, scratch).to(self._dtype)

    def _arrived(
        self, node: ModelNode, place: object, spans: Sequence[Span], tile: Tile, scratch: Scratch
    ) -> torch.Tensor:
        """Some elements of a model on the device, as they are stored."""
        there = (node, *spans[0]) if len(spans) == 1 else None
        stored = self._there.get(there) if there else None
        if stored is None:
            read = self._read_stored(node, place, tile, scratch, spans)
            stored = read.tensor.to(self._device, non_blocking=True)
            if there and node in self._read_again:
                scratch.after(partial(self._context.residence.keep, self._place, there, stored))
        return stored

    @cached_property
    def _sampled(self) -> torch.Tensor:
        """The places of a sample's elements, on the device."""
        return entries_of(self._spans).to(self._device)

    def _accumulate(
        self, reductions: Iterable[MergeNode], values: Mapping[Node, torch.Tensor], tile: Tile
    ) -> None:
        accumulate(reductions, self._program, values, tile, self.block, self._accumulators)

    # both

    def _read(self, node: Node, place: object, tile: Tile, scratch: Scratch) -> Buffer:
        """A tile of a model or of a whole tensor, in the dtype of the arithmetic."""
        if not isinstance(node, ModelNode):
            return Buffer.of(self._cut(node, tile))
        stored = self._spec.stored[node]
        if stored is self._dtype:
            return self._read_stored(node, place, tile, scratch)
        converted = scratch.take(place, self._dtype, tile.stop - tile.start)
        widen(self._read_stored(node, "stored", tile, scratch).tensor, converted.tensor)
        return converted

    def _cut(self, node: Node, tile: Tile) -> torch.Tensor:
        """A tile of a whole tensor."""
        parts = [self._values[node].view(-1)[start:stop] for start, stop in self._places(tile)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _read_stored(
        self,
        model: ModelNode,
        name: object,
        tile: Tile,
        scratch: Scratch,
        spans: Sequence[Span] | None = None,
    ) -> Buffer:
        """Elements of a model as they lie in its file: those of the tile, if no others are given."""
        spans = spans or self._places(tile)
        count = sum(stop - start for start, stop in spans)
        buffer = scratch.take(name, self._spec.stored[model], count)
        size, source, begin = buffer.tensor.element_size(), self._plan.sources[model], 0
        for start, stop in spans:
            end = begin + (stop - start) * size
            source.read_bytes_into(tile.key, (tile.offset + start) * size, buffer.view[begin:end])
            begin = end
        return buffer

    def _places(self, tile: Tile) -> Sequence[Span]:
        """The elements of the key that a tile has; a sample has many ranges."""
        return self._spans if self._pass.sampled else [(tile.start, tile.stop)]

    def _check_all(self, leaves: Mapping[Node, torch.Tensor], tile: Tile) -> None:
        models = [node for node in leaves if isinstance(node, ModelNode)] if self._checked else []
        peaks = peaks_of([leaves[node] for node in models])
        for node, peak in zip(models, peaks, strict=True):
            self._check(node, leaves[node], peak, tile)

    def _check(self, node: Node, values: torch.Tensor, peak: float, tile: Tile) -> None:
        if self._checked and isinstance(node, ModelNode) and not np.isfinite(peak):
            nonfinite = int((~values.to(self._dtype).isfinite()).sum())
            raise MergeError(
                f"{self._plan.sources[node].name}: the key '{tile.name}' has values that are not finite "
                f"({nonfinite} NaN or infinite among its elements {tile.start} to {tile.stop}). "
                "on_nonfinite=keep merges them as they are, on_nonfinite=skip leaves that input out."
            )

    def _write(
        self,
        node: Node,
        outputs: Sequence[Output],
        values: torch.Tensor | None,
        peak: float | None,
        tile: Tile,
        scratch: Scratch,
    ) -> None:
        """Round the values of a tile and write them; a loop leaves out values that no output receives."""
        if peak is None:
            assert values is not None
            (peak,) = peaks_of([values])
        for output in outputs:
            if output in self._spec.least:
                self._context.stats.add_peak(output.job, tile.key, peak)
            dtype = torch_dtype(output.dtype)
            fits, is_kept = peak < overflows_from(dtype, self._dtype), self._plan.keeps(output)
            if fits and not is_kept:
                continue
            if values is None:
                values = self._values_of(tile, scratch)[node]
            stored = values
            if dtype is not values.dtype or self._device != CPU:
                rounded = values if _in_one_step(values, dtype, self._device) else round_to(values, dtype)
                stored = scratch.take("written", dtype, values.numel()).tensor.copy_(rounded)
            if not fits:
                self._count_lost(output.job, self._exact(node, values, tile, scratch), stored, tile)
            if is_kept:
                self._context.sinks[output.job].write(tile.key, tile.offset + tile.start, stored)

    def _exact(self, node: Node, values: torch.Tensor, tile: Tile, scratch: Scratch) -> torch.Tensor:
        """The values before they were rounded, where the rounding may hide an overflow."""
        if values.dtype is self._dtype or not saturates(values.dtype):
            return values.to(CPU, self._dtype)
        return self._values_of(tile, scratch)[node]

    def _count_lost(self, job: int, exact: torch.Tensor, stored: torch.Tensor, tile: Tile) -> None:
        lost = count_lost(exact, stored)
        if not lost:
            return
        unify_nan(stored)
        if self._plan.options.strict:
            how = "too large for" if saturates(stored.dtype) else "not finite in"
            values = counted(lost, "value that is", "values that are")
            raise MergeError(
                f"the key '{tile.name}' of the output has {values} {how} {stored.dtype} "
                f"(elements {tile.start} to {tile.stop}). Write a wider dtype, lower the strength, or drop "
                "strict."
            )
        with self._context.stats.lock:
            nonfinite = self._context.stats.nonfinite
            nonfinite[job, tile.key] = nonfinite.get((job, tile.key), 0) + lost


def _in_one_step(values: torch.Tensor, dtype: torch.dtype, device: str) -> bool:
    """Whether a copy rounds once: torch goes from float64 to a narrow dtype by way of float32."""
    return device == CPU and (values.dtype is not torch.float64 or dtype is torch.float32)


def peaks_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The largest magnitude in each tensor, or NaN if there is one; a device is waited for once."""
    if not tensors:
        return []
    found = torch.stack([end for values in tensors for end in torch.aminmax(values)]).cpu().tolist()
    return [max(-low, high) if low == low else low for low, high in zip(found[::2], found[1::2], strict=True)]

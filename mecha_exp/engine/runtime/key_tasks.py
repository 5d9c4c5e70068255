"""Computes one key, or one expert of it, stage by stage; or copies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mecha_exp.checkpoint import torch_dtype
from mecha_exp.checkpoint.positional import byte_view
from mecha_exp.engine.devices import CPU, moved
from mecha_exp.engine.ir.calls import Extent, changed_shape
from mecha_exp.engine.ir.model_values import ModelValue
from mecha_exp.engine.ir.order_statistic import Span, sample_spans
from mecha_exp.engine.ir.program import DeferredCall, Pass, Program
from mecha_exp.engine.ir.reductions import Accumulator, block_of, is_known, open_accumulator
from mecha_exp.engine.planner.keys.key_plan import KeyPlan
from mecha_exp.engine.runtime.buffers import Scratch
from mecha_exp.engine.runtime.context import MergeContext
from mecha_exp.engine.runtime.key_pass import KeyPass
from mecha_exp.engine.runtime.scheduler import KeyTask, TileTask
from mecha_exp.engine.scaled_fp8 import scale_key
from mecha_exp.errors import MergeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.method_api.state_dict import Tile
from mecha_exp.sources.copier import COPY_BYTES


def tasks_of(key: KeyPlan, context: MergeContext) -> list[KeyTask]:
    """The tasks of a key: one that copies it, or one that computes it, or one for each of its experts."""
    if key.program is None:
        return [CopyKey(key, context)]
    return [ComputeKey(key, part, context) for part in key.parts]


class CopyKey(KeyTask):
    """A key that is not arithmetic: the bytes of the first input, compared with those of the others."""

    def __init__(self, key: KeyPlan, context: MergeContext) -> None:
        self.keys = (key,)
        self._key, self._context = key.key, context
        self.whole_bytes = context.plan.whole_bytes_of(key)
        sources = context.plan.sources
        self._sizes = {m: s.info(self._key).nbytes for m, s in sources.items() if self._key in s}
        copies = [(job, node) for job, node, _ in key.structure.copies if job in context.sinks]
        self._sinks = {
            model: [context.sinks[job] for job, node in copies if node is model] for model in self._sizes
        }
        self._deferred = [(job, node) for job, node in copies if isinstance(node, DeferredCall)]
        self._differs = len(set(self._sizes.values())) > 1
        self._begun = False

    def advance(self) -> Sequence[TileTask] | None:
        if not self._begun:
            self._begun = True
            deferred = [partial(self._compute, job, node) for job, node in self._deferred]
            size = max(self._sizes.values(), default=0)
            return [*deferred, *(partial(self._copy, at) for at in range(0, size, COPY_BYTES))]
        if self._differs:
            with self._context.stats.lock:
                self._context.stats.disagreeing.append(self._key)
        return None

    def _copy(self, start: int, scratch: Scratch) -> None:
        """A part of the key: two buffers do for any number of inputs."""
        first: torch.Tensor | None = None
        for model, size in self._sizes.items():
            count = min(COPY_BYTES, size - start)
            if count <= 0:
                continue
            buffer = scratch.take("copied" if first is None else "compared", torch.uint8, count)
            self._context.plan.sources[model].read_bytes_into(self._key, start, buffer.view)
            for sink in self._sinks[model]:
                sink.write_bytes(self._key, start, buffer.view)
            self._context.progress(self._key, count)
            if first is None:
                first = buffer.tensor
            elif not torch.equal(buffer.tensor, first):
                self._differs = True

    def _compute(self, job: int, node: DeferredCall, scratch: Scratch) -> None:
        """All of the key, as a method that asks for other keys gives it: float32 would round it."""
        dtype, shape = self._context.plan.layouts[job][self._key]
        result = node.owner.whole(node, self._key, shape, torch_dtype(dtype))
        self._context.sinks[job].write_bytes(self._key, 0, byte_view(result.reshape(-1)))


class ComputeKey(KeyTask):
    """A key that is computed by its program, or an expert in it.

    Attributes:
        is_of_trip: whether more trips, or the pass, will come to the key.
    """

    is_of_trip = False

    def __init__(self, key: KeyPlan, part: Tile, context: MergeContext) -> None:
        assert key.program is not None
        self.keys = (key,)
        self._key, self._context = key, context
        self._program: Program = key.program
        self._dtype = key.program.dtype
        self._tile = part  # all of it
        self._device = key.structure.device(context.plan.options)
        self._place = (key.key, part.expert)  # on the device
        self._stage = -1
        self._unmade = self._program.unmade(part.shape)
        self._values: dict[Node, Any] = {}  # small and whole values, and kept tiles, by node
        self._accumulators: dict[MergeNode, Accumulator] = {}
        self.whole_bytes = context.plan.whole_bytes_of(key)
        for node in self._program.extents:
            if isinstance(node, LiteralNode) and isinstance(node.value, torch.Tensor):
                self._values[node] = self._whole_literal(node.value)
            elif isinstance(node, ModelValue):
                self._values[node] = context.model_values[node]

    def advance(self) -> Sequence[TileTask] | None:
        """End the stage that has run, and begin the next one that has tiles."""
        while True:
            for node, accumulator in self._accumulators.items():
                self._values[node] = accumulator.finish(
                    self._program.calls[node].hyperparameters, self._dtype
                )
            self._accumulators = {}
            self._release(None)
            self._stage += 1
            if self._stage == len(self._program.stages):
                self._collect()
                self._values = {}
                self._leave()
                return None
            tiles = self._begin()
            if tiles:
                return tiles

    def _leave(self) -> None:
        """The key is done: its inputs need not stay on the device."""
        self._context.residence.drop(self._place)

    def _begin(self) -> list[TileTask]:
        stage = self._program.stages[self._stage]
        for node in stage.before:
            self._values[node] = () if node in self._unmade else self._run_whole(node)
            self._release(node)
        tasks: list[TileTask] = []
        for pass_ in stage.passes:
            if self._is_needless(pass_):
                if pass_.is_full:
                    nbytes = self._key.structure.bytes_of_pass(pass_)
                    self._context.progress(self._key.key, nbytes // (self._key.experts or 1))
                continue
            block = block_of(pass_.columns(self._tile.shape), bool(pass_.reductions))
            for node, _ in pass_.reductions:
                self._accumulators[node] = self._accumulator(node, block)
            for kept in self._kept(pass_):
                self._values[kept] = torch.empty(self._tile.shape, dtype=self._dtype, device=self._device)
            spans = self._sampled_spans(pass_)
            key_pass = KeyPass(
                self._context,
                self._key,
                self._tile,
                pass_,
                self._values,
                self._accumulators,
                spans,
                self._read_again(),
            )
            tasks += [partial(key_pass.run, tile) for tile in key_pass.tiles()]
        return tasks

    def _read_again(self) -> frozenset[ModelNode]:
        """The inputs that later stages read, which may stay on the device."""
        if self._device == CPU:
            return frozenset()
        later = self._program.stages[self._stage + 1 :]
        return frozenset(m for stage in later for p in stage.passes if p.is_full for m in p.models)

    def _accumulator(self, node: MergeNode, block: int) -> Accumulator:
        """The accumulator for the next round of a reduction."""
        return open_accumulator(node, self._values.get(node), self._tile.stop, block, self._dtype)

    def _sampled_spans(self, pass_: Pass) -> list[Span]:
        """The parts of the key that a pass goes through; none where it goes through all of it."""
        if not pass_.sampled:
            return []
        if self._device != CPU and self._tile.stop <= self._context.plan.options.tile_elements:
            return [(0, self._tile.stop)]  # a GPU sorts a tile in less time than a sample takes
        return sample_spans(self._tile.stop, pass_.columns(self._tile.shape))

    def _release(self, node: MergeNode | DeferredCall | None) -> None:
        """Make room: what is not needed after a node of this stage, or after its passes, is gone."""
        for needless in self._program.released.get((self._stage, node), ()):
            self._values.pop(needless, None)

    def _kept(self, pass_: Pass) -> list[Node]:
        """The tiles of a pass that a later stage reads whole."""
        return [node for node in pass_.kept if node not in self._unmade]

    def _is_needless(self, pass_: Pass) -> bool:
        """Whether a pass would only find known values, such as the entry of a rank after a lucky guess."""
        if self._kept(pass_) or pass_.outputs:
            return False
        return all(is_known(node, self._values.get(node)) for node, _ in pass_.reductions)

    def _run_whole(self, node: MergeNode | DeferredCall) -> torch.Tensor:
        """A small value, a factor, or a method of whole tensors."""
        extent = self._program.extents[node]
        if isinstance(node, DeferredCall):
            result = node.owner.whole(node, self._key.key, self._key.shape, expert=self._tile.expert)
        elif extent is Extent.FACTOR:
            factor: torch.Tensor = self._factor(node)
            return factor
        else:
            result = self._program.calls[node](self._arguments(node), self._tile)
        if extent is Extent.SMALL:
            return result.to(CPU, torch.float64)
        if tuple(result.shape) != self._tile.shape:
            raise changed_shape(node.method, self._tile.name, self._tile.shape, tuple(result.shape))
        return result.to(self._dtype).contiguous()

    def _factor(self, node: MergeNode) -> Any:
        """The value of a factor: of a trip before, or found now."""
        name = (node, self._dtype, self._tile.name, self._tile.expert)
        factor = self._context.factors.find(name)
        if factor is None:
            found = self._program.calls[node].factor(self._arguments(node), self._tile)
            factor = moved(found, CPU) if self.is_of_trip else found
            if self.is_of_trip:
                self._context.factors.keep(name, factor)
        return factor

    def _arguments(self, node: MergeNode) -> Mapping[Node, torch.Tensor]:
        """The values that a method is given, on the device where it runs."""
        if self._device == CPU or self._program.extents[node] is Extent.SMALL:
            return self._values
        held = [child for child in node.children if child in self._values]
        return {**self._values, **{child: moved(self._values[child], self._device) for child in held}}

    def _collect(self) -> None:
        with self._context.stats.lock:
            for job, scale, error in self._key.structure.scales:
                roots = self._program.roots
                self._context.stats.errors.setdefault(job, {})[self._key.key] = self._values[roots[error]]
                if job in self._context.sinks:
                    value = self._values[roots[scale]].to(torch.float32).reshape(1)
                    self._context.sinks[job].write(scale_key(self._key.key), 0, value)
            for job, model, root in self._key.structure.statistics:
                values = self._values[self._program.roots[root]]
                self._context.stats.add_moments(job, model, self._key, self._tile, values)

    def _whole_literal(self, value: torch.Tensor) -> torch.Tensor:
        if value.numel() == 1:
            return value.double().reshape(())
        if tuple(value.shape) != self._key.shape:
            raise MergeError(
                f"a tensor of shape {list(value.shape)} is given where the key '{self._key.key}' has "
                f"{list(self._key.shape)}. Give one number, or a tensor of the key's shape."
            )
        part = value if self._tile.expert is None else value[self._tile.expert]
        return part.to(self._dtype).contiguous()

"""Running a plan: workers take tiles of keys, and the bytes are the same whatever their number.

A worker either moves a key on to its next stage or computes one tile of the stage that it is in. What a
tile gives depends on the tile alone, partial results of reductions are combined in the order of their
blocks, and every tile has its place in the output, so the order of the work leaves no trace.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from mecha_exp.checkpoint import TensorInfo, torch_dtype
from mecha_exp.engine.inputs import Source
from mecha_exp.engine.planning import KeyPlan, Plan
from mecha_exp.engine.program import Extent, Pass, Program
from mecha_exp.engine.resuming import Resumption
from mecha_exp.engine.sinks import Sink
from mecha_exp.errors import MergeError
from mecha_exp.method import Kind, Reduction
from mecha_exp.nodes import LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.signature import Tile

REDUCTION_BLOCK = 1 << 16
"""Elements in a block of a reduction. It is no setting: the partial sums, so the bits, depend on it."""

INTERRUPT_SECONDS = 0.5
"""How long an interrupted merge waits for its workers."""

WORKER_NAME = "mecha_exp worker"
"""Of the threads."""

Progress = Callable[[str, int], None]
"""Told the key and the number of bytes read, after each tile."""


@dataclass
class Tally:
    """What a merge has met so far; the workers share it.

    Attributes:
        nonfinite: of each job and key the number of values of the output that are NaN or infinite.
        disagreeing: copied keys of which the inputs hold different bytes.
        moments: of each job and input the `moments` of each key.
        resumed: the keys that an interrupted run had finished.
    """

    nonfinite: dict[tuple[int, str], int] = field(default_factory=dict)
    disagreeing: list[str] = field(default_factory=list)
    moments: dict[tuple[int, ModelNode], dict[str, torch.Tensor]] = field(default_factory=dict)
    resumed: list[KeyPlan] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def execute(plan: Plan, sinks: dict[int, Sink], progress: Progress = lambda key, nbytes: None) -> Tally:
    """Run a plan into the sinks of its jobs (by index). Commits nothing.

    Raises:
        MergeError: a value that is not finite, a method that failed; the first one, where there are many.
        CheckpointError: reading or writing failed.
    """
    tally = Tally()
    resumption = Resumption(plan, sinks, tally, progress)
    runs: Iterator[_Run] = (
        _KeyRun(key, plan, sinks, tally, progress)
        if key.program is not None
        else _CopyRun(key, plan, sinks, tally, progress)
        for key in plan.keys
        if key.numel and (key.outputs or key.copies or key.statistics) and not resumption.skips(key)
    )
    _Workers(runs, plan.options.threads, plan.options.memory_budget, resumption.finish).run()
    for source in plan.sources.values():
        source.check_unchanged()
    return tally


class _Run:
    """One key on its way through its stages: `advance` gives the tiles of the next stage, or None."""

    key: KeyPlan
    whole_bytes = 0

    def advance(self) -> Sequence[Callable[[], None]] | None:
        raise NotImplementedError


class _CopyRun(_Run):
    """A key that is not arithmetic: the bytes of the first input, compared with those of the others."""

    def __init__(
        self, key: KeyPlan, plan: Plan, sinks: dict[int, Sink], tally: Tally, progress: Progress
    ) -> None:
        self.key = key
        self._key, self._plan, self._sinks = key.key, plan, sinks
        self._copies, self._tally, self._progress = key.copies, tally, progress
        self._done = False

    def advance(self) -> Sequence[Callable[[], None]] | None:
        if self._done:
            return None
        self._done = True
        return [self._copy]

    def _copy(self) -> None:
        held = [source for source in self._plan.sources.values() if self._key in source]
        contents = {id(source): _all_bytes(source, self._key) for source in held}
        for job, model in self._copies:
            if job in self._sinks:
                data = contents[id(self._plan.sources[model])]
                self._sinks[job].write_bytes(self._key, 0, memoryview(data))
        self._progress(self._key, sum(map(len, contents.values())))
        if len(set(map(bytes, contents.values()))) > 1:
            with self._tally.lock:
                self._tally.disagreeing.append(self._key)


class _KeyRun(_Run):
    """A key that is computed by its program."""

    def __init__(
        self, key: KeyPlan, plan: Plan, sinks: dict[int, Sink], tally: Tally, progress: Progress
    ) -> None:
        assert key.program is not None
        self.key = key
        self._key, self._plan, self._sinks, self._tally = key, plan, sinks, tally
        self._program: Program = key.program
        self._progress = progress
        self._dtype = plan.options.compute_dtype
        self._stage = -1
        self._values: dict[Node, torch.Tensor] = {}  # small and whole values, and kept tiles, by node
        self._partials: dict[MergeNode, _Partials] = {}
        self._everything = Tile(key.key, 0, key.numel)
        self.whole_bytes = plan.whole_bytes_of(key)
        for node in self._program.extents:
            if isinstance(node, LiteralNode) and isinstance(node.value, torch.Tensor):
                self._values[node] = self._whole_literal(node.value)

    def advance(self) -> Sequence[Callable[[], None]] | None:
        """End the stage that has run, and begin the next one that has tiles."""
        while True:
            for node, sums in self._partials.items():
                self._values[node] = sums.finish(self._program.calls[node].hyperparameters, self._dtype)
            self._partials = {}
            self._stage += 1
            if self._stage == len(self._program.stages):
                self._collect_statistics()
                self._values = {}
                return None
            tiles = self._begin()
            if tiles:
                return tiles

    def _begin(self) -> list[Callable[[], None]]:
        stage = self._program.stages[self._stage]
        for node in stage.before:
            self._values[node] = self._run_whole(node)
        tiles: list[Callable[[], None]] = []
        for trip in stage.passes:
            block = self._block(trip)
            for node, _ in trip.reductions:
                self._partials[node] = _Partials(node, self._values.get(node), self._key.numel)
            for node in trip.kept:
                self._values[node] = torch.empty(self._key.shape, dtype=self._dtype)
            size = -(-max(self._plan.options.tile_size, block) // block) * block
            for start in range(0, self._key.numel, size):
                stop = min(start + size, self._key.numel)
                tiles.append(partial(self._run_tile, trip, Tile(self._key.key, start, stop)))
        return tiles

    def _block(self, trip: Pass) -> int:
        """What the boundaries of a pass's tiles are multiples of."""
        columns = self._columns if trip.by_rows else 1
        return max(1, REDUCTION_BLOCK // columns) * columns if trip.reductions else columns

    @property
    def _columns(self) -> int:
        return self._key.shape[-1] if self._key.shape else 1

    def _run_whole(self, node: MergeNode) -> torch.Tensor:
        """A small value, or a method of whole tensors."""
        result = self._program.calls[node](self._values, self._everything)
        if self._program.extents[node] is Extent.SMALL:
            return result.to(torch.float64)
        if tuple(result.shape) != self._key.shape:
            raise MergeError(
                f"the merge method '{node.method.identifier}' turned the key '{self._key.key}' of shape "
                f"{list(self._key.shape)} into {list(result.shape)}. A merged tensor keeps its shape."
            )
        return result.to(self._dtype).contiguous()

    def _run_tile(self, trip: Pass, tile: Tile) -> None:
        values = self._tile_values(trip, tile)
        for node, _ in trip.reductions:
            self._reduce(trip, node, values, tile)
        for node in trip.kept:
            self._values[node].view(-1)[tile.start : tile.stop] = values[node]
        for number, node in trip.outputs:
            self._write(number, values[node], tile)
        self._progress(
            self._key.key,
            sum((tile.stop - tile.start) * torch_dtype(self._info(m).dtype).itemsize for m in trip.models),
        )

    def _tile_values(self, trip: Pass, tile: Tile) -> dict[Node, torch.Tensor]:
        """Every value of a pass for one tile, flat; small values as they are."""
        values = dict(self._values)
        columns = self._columns if trip.by_rows else None
        for node in trip.nodes:
            if isinstance(node, ModelNode):
                values[node] = self._load(node, tile)
            elif self._program.extents[node] is Extent.WHOLE:
                values[node] = self._values[node].view(-1)[tile.start : tile.stop]
            elif isinstance(node, MergeNode):
                rows = columns if node.method.kind is Kind.ROWWISE else None
                result = self._program.calls[node](values, tile, rows)
                values[node] = self._flat(node, result, tile)
        return values

    def _flat(self, node: MergeNode, result: torch.Tensor, tile: Tile) -> torch.Tensor:
        if result.numel() != tile.stop - tile.start:
            raise MergeError(
                f"the merge method '{node.method.identifier}' gave {result.numel()} values for a tile of "
                f"{tile.stop - tile.start} of the key '{tile.key}', so it is not {node.method.kind.value}. "
                "Declare it without that."
            )
        return result.reshape(-1).to(self._dtype)

    def _load(self, model: ModelNode, tile: Tile) -> torch.Tensor:
        source = self._plan.sources[model]
        raw = torch.empty(tile.stop - tile.start, dtype=torch_dtype(self._info(model).dtype))
        source.read_into(tile.key, tile.start, raw)
        values = raw.to(self._dtype)
        if self._plan.options.on_nonfinite == "error" and not _all_finite(values):
            count = int((~values.isfinite()).sum())
            raise MergeError(
                f"{source.name}: the key '{tile.key}' has values that are not finite ({count} NaN or "
                f"infinite among its elements {tile.start} to {tile.stop}). on_nonfinite=keep merges them "
                "as they are."
            )
        return values

    def _info(self, model: ModelNode) -> TensorInfo:
        return self._plan.sources[model].info(self._key.key)

    def _reduce(self, trip: Pass, node: MergeNode, values: dict[Node, torch.Tensor], tile: Tile) -> None:
        """The partial results of each block of a tile; blocks are fixed, so tiles leave no trace."""
        sums = self._partials[node]
        block = self._block(trip)
        large = [c for c in node.children if self._program.extents[c] is not Extent.SMALL]
        extra = {"state": sums.state} if node.method.signature.has_state else {}
        for start in range(tile.start, tile.stop, block):
            stop = min(start + block, tile.stop)
            part = {**values, **{c: values[c][start - tile.start : stop - tile.start] for c in large}}
            result = self._program.calls[node](part, Tile(tile.key, start, stop), **extra)
            sums.add(start // block, result)

    def _write(self, number: int, values: torch.Tensor, tile: Tile) -> None:
        for output in self._key.outputs:
            if output.root == number:
                stored = values.to(torch_dtype(output.dtype))
                if not _all_finite(values) or stored.dtype.itemsize < values.dtype.itemsize:
                    self._count_nonfinite(output.job, stored, tile)
                self._sinks[output.job].write(tile.key, tile.start, stored)

    def _count_nonfinite(self, job: int, stored: torch.Tensor, tile: Tile) -> None:
        count = int((~stored.to(self._dtype).isfinite()).sum())
        if not count:
            return
        if self._plan.options.strict:
            raise MergeError(
                f"the key '{tile.key}' of the output has {count} values that are not finite in "
                f"{stored.dtype} (elements {tile.start} to {tile.stop}). Write a wider dtype, lower the "
                "strength, or drop strict."
            )
        with self._tally.lock:
            nonfinite = self._tally.nonfinite
            nonfinite[job, tile.key] = nonfinite.get((job, tile.key), 0) + count

    def _collect_statistics(self) -> None:
        with self._tally.lock:
            for job, model, root in self._key.statistics:
                by_key = self._tally.moments.setdefault((job, model), {})
                by_key[self._key.key] = self._values[self._program.roots[root]]

    def _whole_literal(self, value: torch.Tensor) -> torch.Tensor:
        if value.numel() == 1:
            return value.double().reshape(())
        if tuple(value.shape) != self._key.shape:
            raise MergeError(
                f"a tensor of shape {list(value.shape)} is given where the key '{self._key.key}' has "
                f"{list(self._key.shape)}. Give one number, or a tensor of the key's shape."
            )
        return value.to(self._dtype).contiguous()


class _Partials:
    """The partial results of one round of a reduction, by block.

    Whole numbers add up exactly in any order and are added as they come; fractions are kept apart and
    added in the order of the blocks.
    """

    def __init__(self, node: MergeNode, state: torch.Tensor | None, count: int) -> None:
        assert isinstance(node.method, Reduction)
        self._method = node.method
        self._count = count
        self._blocks: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self.state = state

    def add(self, block: int, result: torch.Tensor) -> None:
        """The result of one block, from any thread."""
        with self._lock:
            if result.is_floating_point():
                self._blocks[block] = result
            elif 0 in self._blocks:
                self._blocks[0] += result
            else:
                self._blocks[0] = result

    def finish(self, hyperparameters: dict[str, object], dtype: torch.dtype) -> torch.Tensor:
        """The state for the next round, or the value of the reduction."""
        total = torch.stack([self._blocks[i] for i in sorted(self._blocks)]).sum(0)
        if self._method.finish is None:
            return total
        return self._method.finish(total, state=self.state, count=self._count, dtype=dtype, **hyperparameters)


class _Workers:
    """Threads that share a queue of tiles and take the next key when it is empty."""

    def __init__(
        self, runs: Iterator[_Run], threads: int, budget: int, finished: Callable[[KeyPlan], None]
    ) -> None:
        self._runs = runs
        self._finished = finished
        self._threads = threads
        self._budget = budget
        self._queue: deque[Callable[[], None]] = deque()
        self._next: _Run | None = next(runs, None)
        self._active = 0  # keys that have begun and not ended
        self._whole_bytes = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._ended = threading.Semaphore(0)

    def run(self) -> None:
        """Work until all keys are done; raises what the first failing tile raised."""
        intra_op = torch.get_num_threads()
        torch.set_num_threads(1)  # a tile is too small to share, and sums must not depend on it
        threads = [
            threading.Thread(target=self._work, name=WORKER_NAME, daemon=True) for _ in range(self._threads)
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:  # an interrupted join() takes its thread for ended, and without a limit
                while not self._ended.acquire(timeout=INTERRUPT_SECONDS):  # Windows does not hear Ctrl-C
                    pass
        except BaseException as error:  # Ctrl-C: the workers stop after the tile that they are at
            self._fail(error)
            limit = time.monotonic() + INTERRUPT_SECONDS  # and what takes longer is left to itself
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join(max(0.0, limit - time.monotonic()))
                if thread.is_alive():
                    atexit.register(thread.join)  # the interpreter cannot end while torch computes
        finally:
            torch.set_num_threads(intra_op)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._work_on()
        finally:
            self._ended.release()

    def _work_on(self) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while True:
                try:
                    item = self._take()  # it prepares the next key, which can fail as well
                    if item is None:
                        return
                    item()
                except BaseException as error:
                    self._fail(error)

    def _take(self) -> Callable[[], None] | None:
        with self._changed:
            while self._error is None:
                if self._queue:
                    return self._queue.popleft()
                if self._next is not None and self._admits(self._next):
                    run, self._next = self._next, next(self._runs, None)
                    self._active += 1
                    self._whole_bytes += run.whole_bytes
                    return partial(self._advance, run)
                if self._next is None and not self._active:
                    return None
                self._changed.wait()
            return None

    def _admits(self, run: _Run) -> bool:
        return (
            not run.whole_bytes
            or not self._whole_bytes
            or (self._whole_bytes + run.whole_bytes <= self._budget)
        )

    def _advance(self, run: _Run) -> None:
        tiles = run.advance()
        if tiles is None:
            self._finished(run.key)
        with self._changed:
            if tiles is None:
                self._active -= 1
                self._whole_bytes -= run.whole_bytes
            else:
                left = [len(tiles)]
                self._queue.extend(partial(self._tile, run, tile, left) for tile in tiles)
            self._changed.notify_all()

    def _tile(self, run: _Run, tile: Callable[[], None], left: list[int]) -> None:
        tile()
        with self._changed:
            left[0] -= 1
            last = left[0] == 0
        if last:
            self._advance(run)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._queue.clear()
            self._changed.notify_all()


def _all_bytes(source: Source, key: str) -> bytearray:
    data = bytearray(source.info(key).nbytes)
    source.read_bytes_into(key, 0, memoryview(data))
    return data


def _all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite; one pass, since a NaN is its own minimum and maximum."""
    low, high = torch.aminmax(values)
    return bool(low.isfinite() & high.isfinite())

"""Running a plan: workers take tiles of keys, and the bytes are the same whatever their number.

A worker either moves a key on to its next stage or computes one tile of the stage that it is in. What a
tile gives depends on the tile alone, partial results of reductions are combined in the order of their
blocks, and every tile has its place in the output, so the order of the work leaves no trace.
"""

from __future__ import annotations

import atexit
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch

from mecha_exp.engine.buffers import Scratch
from mecha_exp.engine.calls import Extent
from mecha_exp.engine.compiling import compile_ahead
from mecha_exp.engine.copying import COPY_BYTES
from mecha_exp.engine.devices import CPU, moved, own_stream
from mecha_exp.engine.kinds import Kinds
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.partials import Partials, block_of, is_known, open_partials
from mecha_exp.engine.planned import KeyPlan, Plan
from mecha_exp.engine.program import LazyNode, Pass, Program
from mecha_exp.engine.resuming import Resumption
from mecha_exp.engine.sinks import Sink
from mecha_exp.engine.tiles import KeyPass
from mecha_exp.engine.work import Progress, Tally, Work
from mecha_exp.errors import MergeError
from mecha_exp.nodes import LiteralNode, MergeNode, Node
from mecha_exp.signature import Tile

Task: TypeAlias = Callable[[Scratch], None]
"""Done by a worker, with the worker's buffers."""

INTERRUPT_SECONDS = 0.5
"""How long an interrupted merge waits for its workers."""

SMALL_KEY = 1 << 14
"""Elements up to which a key costs the interpreter more than the processor: an operation of torch on so many
takes a few microseconds, about as long as calling it."""

WORKER_NAME = "mecha_exp worker"
"""Of the threads."""


def execute(plan: Plan, sinks: dict[int, Sink], progress: Progress = lambda key, nbytes: None) -> Tally:
    """Run a plan into the sinks of its jobs (by index). Commits nothing.

    Raises:
        MergeError: a value that is not finite, a method that failed; the first one, where there are many.
        CheckpointError: reading or writing failed.
    """
    work = Work(plan, sinks, Tally(), progress, Kinds(plan))
    resumption = Resumption(plan, sinks, work.tally, progress)

    def runs(small: bool) -> Iterator[_Run]:
        for key in plan.keys:
            wanted = key.numel and (key.outputs or key.copies or key.statistics)
            if wanted and _is_small(plan, key) is small and not resumption.skips(key):
                yield _KeyRun(key, work) if key.program is not None else _CopyRun(key, work)

    _Workers(runs(small=False), runs(small=True), plan.options, resumption.finish).run()
    for source in plan.sources.values():
        source.check_unchanged()
    return work.tally


def _is_small(plan: Plan, key: KeyPlan) -> bool:
    """Whether a key is more work for the interpreter than for the processor."""
    return key.program is not None and key.numel <= SMALL_KEY and not plan.whole_bytes_of(key)


def compile_loops(plan: Plan) -> None:
    """Begin to compile what a plan needs, while its outputs are being opened."""
    kinds = Kinds(plan)
    compile_ahead(
        fused.text
        for key in plan.keys
        for stage in (key.program.stages if key.program else ())
        for trip in stage.passes
        if (fused := kinds.of(key, trip).fused) is not None
    )


class _Run(ABC):
    """One key on its way through its stages."""

    key: KeyPlan
    whole_bytes = 0

    @abstractmethod
    def advance(self) -> Sequence[Task] | None:
        """The tiles of the next stage; None after the last one."""


class _CopyRun(_Run):
    """A key that is not arithmetic: the bytes of the first input, compared with those of the others."""

    def __init__(self, key: KeyPlan, work: Work) -> None:
        self.key = key
        self._key, self._work = key.key, work
        sources = work.plan.sources
        self._sizes = {m: s.info(self._key).nbytes for m, s in sources.items() if self._key in s}
        self._sinks = {
            model: [work.sinks[job] for job, taken in key.copies if taken is model and job in work.sinks]
            for model in self._sizes
        }
        self._differs = len(set(self._sizes.values())) > 1
        self._begun = False

    def advance(self) -> Sequence[Task] | None:
        if not self._begun:
            self._begun = True
            return [partial(self._copy, at) for at in range(0, max(self._sizes.values()), COPY_BYTES)]
        if self._differs:
            with self._work.tally.lock:
                self._work.tally.disagreeing.append(self._key)
        return None

    def _copy(self, start: int, scratch: Scratch) -> None:
        """A part of the key: two buffers do for any number of inputs."""
        first: torch.Tensor | None = None
        for model, size in self._sizes.items():
            count = min(COPY_BYTES, size - start)
            if count <= 0:
                continue
            buffer = scratch.take("copied" if first is None else "compared", torch.uint8, count)
            self._work.plan.sources[model].read_bytes_into(self._key, start, buffer.view)
            for sink in self._sinks[model]:
                sink.write_bytes(self._key, start, buffer.view)
            self._work.progress(self._key, count)
            if first is None:
                first = buffer.tensor
            elif not torch.equal(buffer.tensor, first):
                self._differs = True


class _KeyRun(_Run):
    """A key that is computed by its program."""

    def __init__(self, key: KeyPlan, work: Work) -> None:
        assert key.program is not None
        self.key = key
        self._key, self._work = key, work
        self._program: Program = key.program
        self._dtype = work.plan.options.compute_dtype
        self._tile = Tile(key.key, 0, key.numel, key.shape)  # all of it
        self._stage = -1
        self._values: dict[Node, torch.Tensor] = {}  # small and whole values, and kept tiles, by node
        self._partials: dict[MergeNode, Partials] = {}
        self.whole_bytes = work.plan.whole_bytes_of(key)
        for node in self._program.extents:
            if isinstance(node, LiteralNode) and isinstance(node.value, torch.Tensor):
                self._values[node] = self._whole_literal(node.value)

    def advance(self) -> Sequence[Task] | None:
        """End the stage that has run, and begin the next one that has tiles."""
        while True:
            for node, partials in self._partials.items():
                self._values[node] = partials.finish(self._program.calls[node].hyperparameters, self._dtype)
            self._partials = {}
            self._release(None)
            self._stage += 1
            if self._stage == len(self._program.stages):
                self._collect_statistics()
                self._values = {}
                return None
            tiles = self._begin()
            if tiles:
                return tiles

    def _begin(self) -> list[Task]:
        stage = self._program.stages[self._stage]
        for node in stage.before:
            self._values[node] = self._run_whole(node)
            self._release(node)
        tasks: list[Task] = []
        for trip in stage.passes:
            if self._is_needless(trip):
                if trip.is_full:
                    self._work.progress(self._key.key, self._work.plan.bytes_of_pass(self._key, trip))
                continue
            block = block_of(trip.columns(self._key.shape), bool(trip.reductions))
            for node, _ in trip.reductions:
                state = self._values.get(node)
                self._partials[node] = open_partials(node, state, self._key.numel, block, self._dtype)
            for kept in trip.kept:
                self._values[kept] = torch.empty(self._key.shape, dtype=self._dtype)
            run = KeyPass(self._work, self._key, trip, self._values, self._partials)
            tasks += [partial(run.run, tile) for tile in run.tiles()]
        return tasks

    def _release(self, node: MergeNode | LazyNode | None) -> None:
        """Make room: what is not needed after a node of this stage, or after its passes, is gone."""
        for needless in self._program.released.get((self._stage, node), ()):
            self._values.pop(needless, None)

    def _is_needless(self, trip: Pass) -> bool:
        """Whether all that a pass is for is known already, as the entry of a rank is after a lucky guess."""
        if trip.kept or trip.outputs:
            return False
        return all(is_known(node, self._values.get(node)) for node, _ in trip.reductions)

    def _run_whole(self, node: MergeNode | LazyNode) -> torch.Tensor:
        """A small value, a factor, or a method of whole tensors."""
        extent = self._program.extents[node]
        if isinstance(node, LazyNode):
            result = node.owner.whole(node, self._key.key, self._key.shape)
        else:
            call, arguments = self._program.calls[node], self._arguments(node)
            if extent is Extent.FACTOR:
                factor: torch.Tensor = moved(call.factor(arguments, self._tile), CPU)
                return factor
            result = call(arguments, self._tile).cpu()
        if extent is Extent.SMALL:
            return result.to(torch.float64)
        if tuple(result.shape) != self._key.shape:
            raise MergeError(
                f"the merge method '{node.method.identifier}' turned the key '{self._key.key}' of shape "
                f"{list(self._key.shape)} into {list(result.shape)}. A merged tensor keeps its shape."
            )
        return result.to(self._dtype).contiguous()

    def _arguments(self, node: MergeNode) -> Mapping[Node, torch.Tensor]:
        """The values that a method is given, on the device where it runs."""
        device = self._work.plan.options.device
        if device == CPU or self._program.extents[node] is Extent.SMALL:
            return self._values
        held = [child for child in node.children if child in self._values]
        return {**self._values, **{child: moved(self._values[child], device) for child in held}}

    def _collect_statistics(self) -> None:
        with self._work.tally.lock:
            for job, model, root in self._key.statistics:
                by_key = self._work.tally.moments.setdefault((job, model), {})
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


class _Workers:
    """Threads that take a large key each, and when there are no more of them tiles of each other's.

    So one reads while another writes: were all at tiles of one key, they would wait for each other, since a
    file is written by one at a time. One of them is at small keys until there are none left. Those need the
    interpreter all the time, of which there is one, and two workers that wait for it in turns are slower than
    one; at the end of a merge, where many a file has its small keys, the others would have nothing to do.
    """

    def __init__(
        self,
        large: Iterator[_Run],
        small: Iterator[_Run],
        options: EngineOptions,
        finished: Callable[[KeyPlan], None],
    ) -> None:
        self._large, self._small = large, small
        self._finished = finished
        self._threads = options.threads
        self._budget = options.memory_budget
        self._device = options.device
        self._queues: dict[int, deque[Task]] = {}  # of each worker the tiles of the key that it is at
        self._next_large, self._next_small = next(large, None), next(small, None)
        self._small_run: _Run | None = None  # that one worker is at
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
        scratch = Scratch(self._device)
        with torch.inference_mode(), own_stream(self._device):
            while True:
                try:
                    task = self._take()  # it prepares the next key, which can fail as well
                    if task is None:
                        return
                    task(scratch)
                except BaseException as error:
                    self._fail(error)

    def _take(self) -> Task | None:
        with self._changed:
            mine = self._queues.setdefault(threading.get_ident(), deque())
            while self._error is None:
                if self._next_small is not None and self._small_run is None:
                    run, self._next_small = self._next_small, next(self._small, None)
                    self._small_run = run
                    return self._begun(run)
                if mine:
                    return mine.popleft()
                if self._next_large is not None and self._admits(self._next_large):
                    run, self._next_large = self._next_large, next(self._large, None)
                    return self._begun(run)
                longest = max(self._queues.values(), key=len)
                if longest:
                    return longest.popleft()
                if self._is_done:
                    return None
                self._changed.wait()
            return None

    def _begun(self, run: _Run) -> Task:
        self._active += 1
        self._whole_bytes += run.whole_bytes
        return partial(self._advance, run)

    @property
    def _is_done(self) -> bool:
        return self._next_large is None and self._next_small is None and not self._active

    def _admits(self, run: _Run) -> bool:
        return (
            not run.whole_bytes
            or not self._whole_bytes
            or (self._whole_bytes + run.whole_bytes <= self._budget)
        )

    def _advance(self, run: _Run, scratch: Scratch) -> None:
        tiles = run.advance()
        while tiles is not None and len(tiles) == 1 and self._error is None:
            tiles[0](scratch)  # nobody can help with it: no other worker is woken for small keys
            tiles = run.advance()
        if tiles is None:
            self._finished(run.key)
        with self._changed:
            if tiles is None:
                self._active -= 1
                self._whole_bytes -= run.whole_bytes
                self._small_run = None if run is self._small_run else self._small_run
            else:
                left = [len(tiles)]
                mine = self._queues[threading.get_ident()]
                mine.extend(partial(self._tile, run, tile, left) for tile in tiles)
            if tiles or run.whole_bytes or self._is_done:  # for what others may be waiting
                self._changed.notify_all()

    def _tile(self, run: _Run, tile: Task, left: list[int], scratch: Scratch) -> None:
        tile(scratch)
        with self._changed:
            left[0] -= 1
            last = left[0] == 0
        if last:
            self._advance(run, scratch)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            for queue in self._queues.values():
                queue.clear()
            self._changed.notify_all()

"""Writes the source of a fused loop from a trace.

This is the loop for a pass that needs the sum of `base + alpha * (model - base)` and the result itself:

    def loop(start, count, table):
        ...
        for block in range(0, count, 65536):
            totals4[:] = 0
            for strip in range(block, min(block + 65536, count), 2048):
                lanes4[:] = 0
                for first in range(strip, min(strip + 2048, count), 512):
                    size = min(512, count - first)
                    x0_ = tiles[0] + first * 4
                    x1_ = tiles[1] + first * 4
                    for one in range(order[3], order[4], 3):
                        a0 = float32(floats[order[one + 0]])
                        peak0 = 2 + order[one + 1]
                        y0_ = tiles[peak0] + first * 4
                        sum0_ = lanes4_ + 256 * order[one + 2]
                        for row in range(0, size, 64):
                            for lane in range(min(64, size - row)):
                                j = row + lane
                                v0 = entry(x1_, j, float32, 1, 4)
                                v1 = entry(x0_, j, float32, 0, 4)
                                v2 = float32(v0 - v1)
                                v3 = float32(a0 * v2)
                                v4 = float32(v1 + v3)
                                put(y0_, j, v4, 2, 4)
                                put(sum0_, lane, entry(sum0_, lane, float32, 3, 4) + v4, 3, 4)
                add_to(totals4, lanes4)
            fold(totals4, sums4, 64)
            ...

The table holds the addresses of what the loop reads and writes, so that every loop is called alike. All
memory is the caller's, and nothing can fail: the machine code needs nothing of numba's. The last two numbers
of an `entry` say that what it reads is one of so many stretches of memory, none of which overlap. A trace
with many results is divided into several loops over a strip (`partition`). What is done in the same way for
many points is written once (`loop_body`), so the source is the same for any number of points.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from mecha_exp.engine.compiler.abi import WIDEST_DIGIT, WORD, Rank, Table
from mecha_exp.engine.compiler.jit import LoopText, converts_half
from mecha_exp.engine.compiler.loop_body import LoopBody, LoopSpec
from mecha_exp.engine.compiler.ops import NUMBERS, STORED
from mecha_exp.engine.compiler.partition import goes_by_rows, split_loops, split_rows
from mecha_exp.engine.compiler.primitives.rows import ROW_LANES
from mecha_exp.engine.compiler.trace import DRAW, Ref, Trace
from mecha_exp.engine.ir.reductions import LANES, REDUCTION_BLOCK, STRIP
from mecha_exp.graph.nodes import MergeNode
from mecha_exp.method_api.method import Reduction

SHORT = 1 << 9
"""Entries of a strip that several loops go over: the values that they spill stay in the first cache."""

_SORT_BYTES = 16
"""What the sort of a row takes for each entry."""

FIXED = 1 << 20
"""The nominal length of arrays whose true length no loop uses: the source does not depend on it."""


def loop_dtype(stored: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loop reads or writes a tile: as stored, or converted by torch."""
    direct = stored in STORED and compute_dtype is torch.float32
    return stored if direct and (stored is not torch.float16 or converts_half()) else compute_dtype


class LoopWriter:
    """Writes the source of a loop."""

    def __init__(
        self,
        trace: Trace,
        compute_dtype: torch.dtype,
        read: Sequence[torch.dtype],
        written: Sequence[torch.dtype | None],
    ) -> None:
        self._trace = trace
        self._summed = [*dict.fromkeys(_terms_summed(trace))]
        ranked = [ref for node, refs in trace.terms if not _sums(node) for ref in refs]
        self._ranks = len(ranked)
        read = read or [compute_dtype] * len(trace.inputs)
        written = written or [compute_dtype] * len(trace.outputs)
        self._is_by_rows = goes_by_rows(trace)
        parts = [*split_rows(trace)] if self._is_by_rows else split_loops(trace, self._summed, ranked, read)
        self._spec = LoopSpec(trace, compute_dtype, read, written, self._summed, ranked, parts)
        self._key_type = self._spec.key_type
        self._length = STRIP if len(parts) == 1 else SHORT
        lanes = [self._spec.lane_dtype(index) for index in range(len(self._summed))]
        self._slots = [lanes[:index].count(dtype) for index, dtype in enumerate(lanes)]
        self._lanes = {dtype: lanes.count(dtype) for dtype in sorted(set(lanes), key=str)}
        families: dict[object, list[LoopBody]] = {}
        for part in parts:
            body = LoopBody(part, self._spec)
            families.setdefault(body.structure, []).append(body)
        self._families = [*families.values()]
        self._order: list[int] = []
        self._lists: dict[int, Sequence[int]] = {}

    def text(self) -> LoopText:
        """The source, and the memory and integers that the loop receives."""
        self._order, self._lists = [], {}
        source = "\n".join(self._module()) + "\n"
        order = [*self._order]
        for index, numbers in self._lists.items():
            order[index : index + 2] = len(order), len(order) + len(numbers)
            order += numbers
        room = sum(size * np.dtype(kind).itemsize for _, size, kind in self._rooms())
        room += sum(count * LANES * (dtype.itemsize + 8) for dtype, count in self._lanes.items())
        held = self._spec.held_rows
        row_room = (4 * len(held) + _SORT_BYTES) if held else 0
        return LoopText(source, room, tuple(order), row_room)

    def _module(self) -> Iterator[str]:
        yield "import numpy as np"
        yield "from numba import boolean, float32, float64, int16, int32, int64, uint8, uint64"
        for module in ("intrinsics", "number_formats", "sums"):
            yield f"from mecha_exp.engine.compiler.kernels.{module} import *"
        if self._spec.held_rows:
            yield "from mecha_exp.engine.compiler.kernels.radix import rank_rows"
        yield ""
        yield "def loop(start, count, table):"
        yield from _indented(1, self._arrays())
        yield from _indented(1, self._prologue())
        yield from _indented(1, self._tile())
        for number in range(len(self._trace.inputs)):
            yield f"    peaks[{number}] = p{number}"

    def _tile(self) -> Iterator[str]:
        """The statements for one tile."""
        if self._is_by_rows:
            return self._groups()
        return self._blocks() if self._summed else self._strips("0", "count", self._families)

    def _integer(self, number: int) -> str:
        """An integer that the loop reads from `order`, so that its source does not depend on it."""
        self._order.append(number)
        return f"order[{len(self._order) - 1}]"

    def _integer_range(self, numbers: Sequence[int], step: int) -> str:
        """A range over the positions in `order` where groups of `step` integers begin."""
        self._lists[len(self._order)] = numbers
        return f"range({self._integer(0)}, {self._integer(0)}, {step})"

    # memory

    def _arrays(self) -> Iterator[str]:
        """The arrays that the table has the addresses of; a name that ends in `_` is an address."""
        trace = self._trace
        tiles = len(trace.inputs) + len(trace.outputs)
        yield f"places = array_at(table, {Table.TILES:d}, int64)"
        yield f"order = array_at(places[{Table.ORDER:d}], {FIXED}, int64)"
        yield f"floats = array_at(places[{Table.FLOATS:d}], {FIXED}, float64)"
        yield f"integers = array_at(places[{Table.INTEGERS:d}], {FIXED}, int64)"
        yield f"peaks = array_at(places[{Table.PEAKS:d}], {self._integer(tiles)}, int64)"
        yield f"tiles = array_at(table + {WORD * Table.TILES}, {self._integer(tiles)}, int64)"
        first = f"table + {WORD * Table.TILES} + {WORD} * {self._integer(tiles)}"
        yield f"terms = array_at({first}, {FIXED}, int64)"
        for index in range(self._ranks):
            yield f"s{index} = array_at(terms[{1 + index}], count + 1, {self._key_type})"
            yield f"found{index} = array_at(terms[{1 + self._ranks + index}], {len(Rank)}, int64)"
        room, offset = f"places[{Table.ROOM:d}]", 0
        for name, size, kind in self._rooms():
            yield f"{name}_ = {room} + {offset}"
            yield f"{name} = array_at({name}_, {size}, {kind})"
            offset += size * np.dtype(kind).itemsize
        if self._summed:
            yield f"columns = {self._integer(len(_terms_summed(trace)))}"
            yield f"results = array_at(terms[0], {FIXED}, float64)"
        end = f"{room} + {offset}"
        for dtype, count in self._lanes.items():
            kind, size = NUMBERS[dtype], dtype.itemsize
            yield f"sums{size} = {self._integer(count)}"
            yield f"lanes{size}_ = {end}"
            yield f"lanes{size} = array_at(lanes{size}_, {LANES} * sums{size}, {kind})"
            yield f"totals{size}_ = lanes{size}_ + {LANES * size} * sums{size}"
            yield f"totals{size} = array_at(totals{size}_, {LANES} * sums{size}, float64)"
            end = f"totals{size}_ + {LANES * 8} * sums{size}"

    def _rooms(self) -> Iterator[tuple[str, int, str]]:
        """Name, length and type of the arrays that serve one strip after another, but for the lanes."""
        for number in range(len(self._trace.draws)):
            yield f"room{number}", STRIP + 8, "float32"
        for index in range(self._ranks):
            yield f"keys{index}", STRIP, self._key_type
            yield f"words{index}", STRIP // 8, "uint64"
        if self._is_by_rows:
            yield "row", ROW_LANES * len(self._spec.parts[0].spilled), "float64"
        if self._spec.held_rows:
            yield "starts", 1 << WIDEST_DIGIT, "int32"
        for place, number in enumerate(self._spec.spilled):
            if place not in self._spec.held_rows:
                yield f"left{place}", SHORT, self._spec.kind_spilled(number)

    # once a tile, a block, a strip

    def _prologue(self) -> Iterator[str]:
        """The statements at the beginning of a tile."""
        trace = self._trace
        whole = sum(not dtype.is_floating_point for _, dtype in trace.arguments)
        for number in range(len(trace.draws)):
            for index, name in enumerate(("key0_", "key1_", "stream")):
                yield f"{name}{number} = integers[{whole + 3 * number + index}]"
        for index in range(self._ranks):
            yield f"keys{index}[:] = 0"
            yield f"low{index} = {self._key_type}(found{index}[{Rank.LOW:d}])"
            yield f"high{index} = {self._key_type}(found{index}[{Rank.HIGH:d}])"
        yield f"last = {self._key_type}({2 ** (31 if self._key_type == 'int32' else 63) - 1})"
        yield "peaks[:] = 0"
        for number in range(len(trace.inputs)):
            yield f"p{number} = {self._key_type}(0)"

    def _blocks(self) -> Iterator[str]:
        """The statements for a tile with sums: the sums of a block are made of those of its strips."""
        sizes = [dtype.itemsize for dtype in self._lanes]
        yield f"for block in range(0, count, {REDUCTION_BLOCK}):"
        yield from (f"    totals{size}[:] = 0" for size in sizes)
        yield f"    for strip in range(block, min(block + {REDUCTION_BLOCK}, count), {STRIP}):"
        yield from (f"        lanes{size}[:] = 0" for size in sizes)
        yield from _indented(2, self._strips("strip", f"min(strip + {STRIP}, count)", self._families))
        yield from (f"        add_to(totals{size}, lanes{size})" for size in sizes)
        for dtype, size in zip(self._lanes, sizes, strict=True):
            yield f"    fold(totals{size}, sums{size}, {LANES})"
            yield f"    for one in {self._integer_range(self._results(dtype), 2)}:"
            yield f"        place = block // {REDUCTION_BLOCK} * columns + order[one]"
            yield f"        results[place] = totals{size}[order[one + 1] * {LANES}]"

    def _results(self, dtype: torch.dtype) -> list[int]:
        """(column, slot) of every result whose lanes have this dtype."""
        places = enumerate(self._summed.index(ref) for ref in _terms_summed(self._trace))
        lanes = [(column, index) for column, index in places if self._spec.lane_dtype(index) is dtype]
        return [number for column, index in lanes for number in (column, self._slots[index])]

    def _groups(self) -> Iterator[str]:
        """What is done with a tile by rows: short rows go together, a long one in strips."""
        terms, of_rows, results = (LoopBody(part, self._spec) for part in self._spec.parts)
        whole = sum(not dtype.is_floating_point for _, dtype in self._trace.arguments)
        held = self._spec.held_rows
        summed, spread = (
            [place for place in map(self._spec.spilled.index, part.reloaded) if place not in held]
            for part in (of_rows.part, results.part)
        )
        yield f"columns = integers[{whole + 3 * len(self._trace.draws)}]"
        yield f"together = max({SHORT} // columns, 1) * columns"
        yield from self._rows_held()
        yield "for group in range(0, count, together):"
        yield "    end = min(group + together, count)"
        yield "    row[:] = 0"
        yield from _indented(1, self._strips("group", "end", [[terms]], "end"))
        for place in summed:
            yield f"        sum_rows(left{place}, size, columns, row[{ROW_LANES} * {place} :])"
        yield "    size = (end - group) // columns"
        yield from (f"    rank_rows(held{place}_, size, columns, sorted_, starts)" for place in held)
        if summed:
            yield from _indented(1, self._family([of_rows]))
        yield from (f"    spread_rows(left{place}, size, columns)" for place in spread)
        yield from _indented(1, self._strips("group", "end", [[results]], "end"))

    def _rows_held(self) -> Iterator[str]:
        """The memory after all other that has the length of a row, where rows are ranked."""
        if self._spec.held_rows:
            fixed = sum(size * np.dtype(kind).itemsize for _, size, kind in self._rooms())
            yield f"longest = max(columns, {SHORT})"
            yield f"sorted_ = places[{Table.ROOM:d}] + {fixed}"
        for number, place in enumerate(self._spec.held_rows):
            yield f"held{place}_ = sorted_ + {_SORT_BYTES + 4 * number} * longest"

    def _strips(
        self, begin: str, end: str, families: Sequence[Sequence[LoopBody]], last: str = "count"
    ) -> Iterator[str]:
        """The loop over a range of the tile, one short strip after another."""
        yield f"for first in range({begin}, {end}, {self._length}):"
        yield f"    size = min({self._length}, {last} - first)"
        for number, dtype in enumerate(self._spec.read):
            yield f"    x{number}_ = tiles[{number}] + first * {dtype.itemsize}"
        for place in self._spec.held_rows:
            yield f"    left{place}_ = held{place}_ + (first - {begin}) * 4"
        for draw in self._draws_in(families):
            arguments = f"room{draw}, start + first, size, key0_{draw}, key1_{draw}, stream{draw}"
            yield f"    before = drawn({arguments})"
            yield f"    d{draw}_ = room{draw}_ + before * 4"
        for family in families:
            yield from _indented(1, self._family(family))
        for index in range(self._ranks):
            bracket = f"low{index}, high{index}, last, words{index}, found{index}"
            yield f"    gathered(keys{index}, size, {bracket}, s{index})"

    def _draws_in(self, families: Sequence[Sequence[LoopBody]]) -> list[object]:
        """Which random draws these parts look at."""
        parts = (words.part for family in families for words in family)
        computed = {number for part in parts for number in part.computed}
        expressions = self._trace.expressions
        return [e.operands[0] for n, e in enumerate(expressions) if n in computed and e.operation == DRAW]

    # a loop

    def _family(self, members: Sequence[LoopBody]) -> Iterator[str]:
        """The loop of parts that do the same; it reads the positions of their arguments, outputs and sums."""
        body, inputs = members[0], len(self._trace.inputs)
        places = [self._places(member) for member in members]
        width = len(places[0])
        yield f"for one in {self._integer_range([index for each in places for index in each], width)}:"
        at = (f"order[one + {position}]" for position in range(width))
        for slot, number in enumerate(body.arguments):
            dtype = self._trace.arguments[number][1]
            small = "floats" if dtype.is_floating_point else "integers"
            yield f"    a{slot} = {NUMBERS[dtype]}({small}[{next(at)}])"
        for slot, number in enumerate(body.part.outputs):
            yield f"    peak{slot} = {inputs} + {next(at)}"
            if (stored := self._spec.written[number]) is not None:
                yield f"    y{slot}_ = tiles[peak{slot}] + first * {stored.itemsize}"
            yield f"    q{slot} = {self._key_type}(0)"
        for slot, index in enumerate(body.part.sums):
            size = self._spec.lane_dtype(index).itemsize
            yield f"    sum{slot}_ = lanes{size}_ + {size * LANES} * {next(at)}"
        yield from _indented(1, _rows(body) if body.part.sums else _flat(body))
        for slot in range(len(body.part.outputs)):
            yield f"    peaks[peak{slot}] = max(peaks[peak{slot}], int64(q{slot}))"

    def _places(self, body: LoopBody) -> list[int]:
        """The positions of the arguments, outputs and sums of a part."""
        kinds = [dtype.is_floating_point for _, dtype in self._trace.arguments]
        arguments = [kinds[:number].count(kinds[number]) for number in body.arguments]
        slots = [self._slots[index] for index in body.part.sums]
        return [*arguments, *body.part.outputs, *slots] or [0]


def _flat(body: LoopBody) -> Iterator[str]:
    yield "for j in range(size):"
    yield from _indented(1, body.lines)


def _rows(body: LoopBody) -> Iterator[str]:
    """The loops of a part with sums: rows of one entry for each lane, then the last, shorter row."""
    yield f"whole = size // {LANES} * {LANES}"
    for rows, lanes in (("0, whole", f"{LANES}"), ("whole, size", "size - row")):
        yield f"for row in range({rows}, {LANES}):"
        yield f"    for lane in range({lanes}):"
        yield "        j = row + lane"
        yield from _indented(2, body.lines)


def _terms_summed(trace: Trace) -> list[Ref]:
    """The terms of all sums, in the order of their results."""
    return [ref for node, refs in trace.terms if _sums(node) for ref in refs]


def _sums(node: MergeNode) -> bool:
    return isinstance(node.method, Reduction) and node.method.sums


def _indented(level: int, lines: Iterable[str]) -> Iterator[str]:
    return ("    " * level + line for line in lines)

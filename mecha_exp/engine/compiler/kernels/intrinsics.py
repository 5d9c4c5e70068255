# mypy: ignore-errors
"""What a fused loop calls and Python does not have. Only loops import it, since numba may be missing."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from mecha_exp.engine.compiler.abi import Rank, words

_REINTERPRETED = {
    types.float32: types.int32,
    types.float64: types.int64,
    types.int32: types.float32,
    types.int64: types.float64,
}
_LLVM = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int32: ir.IntType(32),
    types.int64: ir.IntType(64),
}
_RANK = words(Rank)


@intrinsic
def bits(context, value):
    """The bits of a fraction as a whole number of that size, or the other way round."""
    result = _REINTERPRETED[value]

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], _LLVM[result])

    return result(value), build


number = bits


@intrinsic
def array_at(context, address, size, kind):
    """The array of so many entries at an address; whose memory it is is not counted."""
    result = types.Array(kind.dtype, 1, "C")

    def build(context, builder, signature, args):
        entry = context.get_data_type(result.dtype)
        item_bytes = context.get_constant(types.intp, context.get_abi_sizeof(entry))
        array = context.make_array(result)(context, builder)
        data = builder.inttoptr(args[0], entry.as_pointer())
        shape, strides = [args[1]], [item_bytes]
        populate_array(array, data=data, shape=shape, strides=strides, itemsize=item_bytes, meminfo=None)
        return array._getvalue()

    return result(types.int64, types.int64, kind), build


@intrinsic(prefer_literal=True)
def entry(context, address, index, kind, stretch, several):
    """An entry of the stretch of memory at an address, which is one of several that do not overlap."""

    def build(context, builder, signature, args):
        pointer = _entry_pointer(context, builder, kind.dtype, args)
        loaded = builder.load(pointer)
        _tell_apart(builder, loaded, stretch.literal_value, several.literal_value)
        return loaded

    return kind.dtype(types.int64, types.int64, kind, stretch, several), build


@intrinsic(prefer_literal=True)
def put(context, address, index, value, stretch, several):
    """Write an entry; see `entry`."""

    def build(context, builder, signature, args):
        pointer = _entry_pointer(context, builder, value, args)
        stored = builder.store(args[2], pointer)
        _tell_apart(builder, stored, stretch.literal_value, several.literal_value)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value, stretch, several), build


def _entry_pointer(context, builder, kind, args):
    start = builder.inttoptr(args[0], context.get_data_type(kind).as_pointer())
    return builder.gep(start, [args[1]], inbounds=True)


def _tell_apart(builder, access, stretch, several):
    """Tell the compiler that no other stretch overlaps with this one: it need not look before a loop."""
    module = builder.module
    domain = module.add_metadata(["mecha_exp"])
    scopes = [module.add_metadata([f"stretch {number}", domain]) for number in range(several)]
    access.set_metadata("alias.scope", module.add_metadata([scopes[stretch]]))
    access.set_metadata("noalias", module.add_metadata(scopes[:stretch] + scopes[stretch + 1 :]))


@intrinsic
def smaller(context, a, b):
    """a where a < b, else b: one instruction, unlike what Python says for it. b where one is not a number."""
    return _chosen("<", a)


@intrinsic
def larger(context, a, b):
    """a where a > b, else b; see `smaller`."""
    return _chosen(">", a)


def _chosen(sign, kind):
    def build(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(sign, *args), *args)

    return kind(kind, kind), build


@intrinsic
def shifted_right(context, value, places):
    """value >> places as in torch: all sign where places are out of range."""
    return _shift(value, places, lambda b, v, p: b.ashr(v, p), lambda b, v, last: b.ashr(v, last))


@intrinsic
def shifted_left(context, value, places):
    """value << places as in torch: 0 where places are out of range."""
    return _shift(value, places, lambda b, v, p: b.shl(v, p), lambda b, v, last: v.type(0))


def _shift(value, places, inside, outside):
    def build(context, builder, signature, args):
        number, count = args
        last = number.type(number.type.width - 1)
        fits = builder.icmp_unsigned("<=", count, last)
        safe = builder.select(fits, count, last)
        return builder.select(fits, inside(builder, number, safe), outside(builder, number, last))

    return value(value, places), build


@intrinsic
def magnitude(context, value):
    """The bits of abs(value): they sort as it does, infinity and NaN last."""
    result = _REINTERPRETED[value]

    def build(context, builder, signature, args):
        raw = builder.bitcast(args[0], _LLVM[result])
        return builder.and_(raw, raw.type((1 << (raw.type.width - 1)) - 1))

    return result(value), build


@intrinsic
def ordered(context, value):
    """A whole number that sorts as the fraction does, the largest one for what is not a number."""
    result = _REINTERPRETED[value]

    def build(context, builder, signature, args):
        raw = builder.bitcast(args[0], _LLVM[result])
        width = raw.type.width
        last = raw.type((1 << (width - 1)) - 1)
        turned = builder.xor(raw, builder.and_(builder.ashr(raw, raw.type(width - 1)), last))
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), last, turned)

    return result(value), build


@njit(nogil=True, error_model="numpy", _nrt=False)
def clamped(value, low, high):
    """At least low, then at most high; NaN stays."""
    raised = low if value < low else value
    return high if high < raised else raised


@njit(nogil=True, error_model="numpy", _nrt=False)
def gathered(keys, count, low, high, last, words, found, kept):
    """Count the sort keys of a strip below a bracket and at its ends, and append the few inside to `kept`.

    `found` is a row of `abi.Rank`, whose counts grow; `last` is the sort key of NaN; `words` is room.
    """
    inside = words.view(np.uint8)  # eight of them are looked at as one word
    below, no_numbers, place = np.int32(0), np.int32(0), np.uint64(found[_RANK.INSIDE])
    at_low, at_high = np.int32(0), np.int32(0)
    for i in range(count):
        inside[i] = np.uint8(keys[i] > low) & np.uint8(keys[i] < high)
    for i in range(count):
        at_low = np.int32(at_low + np.int32(keys[i] == low))
    for i in range(count):
        at_high = np.int32(at_high + np.int32(keys[i] == high))
    for i in range(count):
        below = np.int32(below + np.int32(keys[i] < low))
    for i in range(count):
        no_numbers = np.int32(no_numbers + np.int32(keys[i] == last))
    for i in range(count, (count + 7) >> 3 << 3):
        inside[i] = 0
    for word in range((count + 7) >> 3):
        if words[word]:
            for i in range(8 * word, 8 * word + 8):
                kept[place] = keys[i]
                place += np.uint64(inside[i])
    found[_RANK.BELOW] += below
    found[_RANK.NAN] += no_numbers
    found[_RANK.AT_LOW] += at_low
    found[_RANK.AT_HIGH] += at_high if high > low else np.int32(0)
    found[_RANK.INSIDE] = np.int64(place)


@njit(nogil=True, error_model="numpy", _nrt=False)
def drawn(room, first, count, key0, key1, stream):
    """Fill `room` with draws of `mecha_exp.random.uniforms`; number `first` comes at the place returned."""
    before = first & 3
    low32 = np.uint64(0xFFFFFFFF)
    word = np.uint64(32)
    for block in range((before + count + 3) >> 2):
        counter = np.uint64((first >> 2) + block)
        c0, c1, c2, c3 = counter & low32, counter >> word, np.uint64(stream), np.uint64(0)
        k0, k1 = np.uint64(key0), np.uint64(key1)
        for _ in range(10):
            p0 = np.uint64(0xD2511F53) * c0
            p1 = np.uint64(0xCD9E8D57) * c2
            c0, c1, c2, c3 = (p1 >> word) ^ c1 ^ k0, p1 & low32, (p0 >> word) ^ c3 ^ k1, p0 & low32
            k0 = (k0 + np.uint64(0x9E3779B9)) & low32
            k1 = (k1 + np.uint64(0xBB67AE85)) & low32
        place = block << 2
        room[place] = np.float32(np.int32(c0 >> np.uint64(8))) * np.float32(2**-24)
        room[place + 1] = np.float32(np.int32(c1 >> np.uint64(8))) * np.float32(2**-24)
        room[place + 2] = np.float32(np.int32(c2 >> np.uint64(8))) * np.float32(2**-24)
        room[place + 3] = np.float32(np.int32(c3 >> np.uint64(8))) * np.float32(2**-24)
    return before

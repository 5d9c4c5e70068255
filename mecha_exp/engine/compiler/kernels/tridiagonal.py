# mypy: ignore-errors
"""The eigenvector kernels: a symmetric matrix is made tridiagonal, and eigenvectors of that are found.

Matrices are one array, row after row. Of a symmetric matrix the entries below the diagonal are not read.
"""

import numpy as np
from numba import float32, float64, njit

from mecha_exp.engine.compiler.kernels.intrinsics import array_at
from mecha_exp.engine.compiler.primitives.eigenvectors import LANES as _LANES

__all__ = ["array_at", "bisect", "reduce_rows", "solve"]

_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
_SUMS = {"reassoc", "contract", "nsz"}  # terms may be added in any order, as in a product by BLAS
_GROUP = 4  # rows that are read together
_HALVINGS = 52  # of an interval, to what float64 tells apart
_NOTHING = 1e-100  # entries of a vector of length 1 that are as good as zeros; far smaller ones would be slow


@njit(**_OPTIONS, fastmath=_SUMS)
def add_rows(a, size, row, x, y):
    """y += A x for the rows from one on, and for the columns that mirror them."""
    while row < size:
        together = min(_GROUP, size - row)
        for i in range(row, row + together):
            y[i] += a[i * size + i] * x[i]
            for j in range(i + 1, row + together):
                y[i] += a[i * size + j] * x[j]
                y[j] += a[i * size + j] * x[i]
        after = row + together
        if after < size:  # so the group is full
            rest, result = x[after:size], y[after:size]
            first = a[row * size + after : (row + 1) * size]
            second = a[(row + 1) * size + after : (row + 2) * size]
            third = a[(row + 2) * size + after : (row + 3) * size]
            fourth = a[(row + 3) * size + after : (row + 4) * size]
            x0, x1, x2, x3 = x[row], x[row + 1], x[row + 2], x[row + 3]
            s0 = s1 = s2 = s3 = float32(0)
            for j in range(len(rest)):
                a0, a1, a2, a3 = first[j], second[j], third[j], fourth[j]
                s0 += a0 * rest[j]
                s1 += a1 * rest[j]
                s2 += a2 * rest[j]
                s3 += a3 * rest[j]
                result[j] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            y[row] += s0
            y[row + 1] += s1
            y[row + 2] += s2
            y[row + 3] += s3
        row = after


@njit(**_OPTIONS, fastmath=_SUMS)
def reflect(row, v):
    """The v with v_0 = 1, the scale and the b for which I - scale v v^T makes of a row (b, 0, 0, ...)."""
    others = 0.0
    for k in range(1, len(row)):
        others += float64(row[k]) * float64(row[k])
    head = float64(row[0])
    made, scale, share = head, 0.0, 0.0
    if others > 0:
        made = -np.copysign(np.sqrt(head * head + others), head)
        scale, share = (made - head) / made, 1 / (head - made)
    for k in range(1, len(row)):
        v[k] = row[k] * float32(share)
    v[0] = 1
    return float32(scale), made


@njit(**_OPTIONS, fastmath=_SUMS)
def reduce_rows(first, count, size, a, v, w, reflectors, scales, diagonal, beside):
    """Make rows tridiagonal; what that does to later rows is left to A -= V^T W + W^T V.

    Source: the blocked reduction of LAPACK's sytrd (Dongarra, Sorensen & Hammarling 1989).

    Args:
        first, count: which rows.
        size: the rows of A.
        a: A, of which the rows are overwritten.
        v, w: V and W, [count, size], zeros at first.
        reflectors, scales: the reflections that A was turned by, [size - 1, size] and [size - 1].
        diagonal, beside: the tridiagonal matrix, [size] and [size - 1].
    """
    for done in range(count):
        i = first + done
        row = a[i * size + i : (i + 1) * size]
        for k in range(done):
            before_v, before_w = v[k * size + i : (k + 1) * size], w[k * size + i : (k + 1) * size]
            of_v, of_w = before_v[0], before_w[0]
            for j in range(len(row)):
                row[j] -= before_v[j] * of_w + before_w[j] * of_v
        diagonal[i] = row[0]
        if i + 1 == size:
            return
        start, end = done * size + i + 1, (done + 1) * size
        vector, product = v[start:end], w[start:end]
        scale, made = reflect(row[1:], vector)
        scales[i], beside[i] = scale, made
        kept = reflectors[i * size + i + 1 : (i + 1) * size]
        for j in range(len(vector)):
            kept[j] = vector[j]
        add_rows(a, size, i + 1, v[done * size : end], w[done * size : end])
        for k in range(done):
            before_v, before_w = (
                v[k * size + i + 1 : (k + 1) * size],
                w[k * size + i + 1 : (k + 1) * size],
            )
            of_v = of_w = float32(0)
            for j in range(len(vector)):
                of_v += before_v[j] * vector[j]
                of_w += before_w[j] * vector[j]
            for j in range(len(vector)):
                product[j] -= before_v[j] * of_w + before_w[j] * of_v
        along = float32(0)
        for j in range(len(vector)):
            product[j] *= scale
            along += product[j] * vector[j]
        along *= scale / float32(2)
        for j in range(len(vector)):
            product[j] -= along * vector[j]


@njit(**_OPTIONS)
def bisect(first, diagonal, squares, low, high, pivots, below):
    """Close the intervals from low to high around the eigenvalues, `first` the number of the first one.

    So many eigenvalues are below x as T - x I has negative pivots. Squares are those beside the diagonal,
    none of them 0. Pivots and below are room for as many numbers as there are intervals.
    """
    for _ in range(_HALVINGS):
        for k in range(len(low)):
            pivots[k] = diagonal[0] - (low[k] + high[k]) / 2
            below[k] = 1.0 if pivots[k] < 0 else 0.0
        for i in range(1, len(diagonal)):
            here, square = diagonal[i], squares[i - 1]
            for k in range(len(low)):
                pivot = here - (low[k] + high[k]) / 2 - square / pivots[k]
                pivots[k] = pivot
                below[k] += 1.0 if pivot < 0 else 0.0
        for k in range(len(low)):
            middle = (low[k] + high[k]) / 2
            if below[k] > first + k:
                high[k] = middle
            else:
                low[k] = middle


@njit(**_OPTIONS)
def factor(diagonal, beside, values, least, down, up):
    """The pivots of T - x I from the top and from the bottom, x being a value for each lane."""
    size = len(diagonal)
    for lane in range(_LANES):
        down[lane] = diagonal[0] - values[lane]
        up[(size - 1) * _LANES + lane] = diagonal[size - 1] - values[lane]
    for i in range(1, size):
        here, square = diagonal[i], beside[i - 1] * beside[i - 1]
        before, now = down[(i - 1) * _LANES : i * _LANES], down[i * _LANES : (i + 1) * _LANES]
        for lane in range(_LANES):
            pivot = before[lane] if abs(before[lane]) > least else least
            now[lane] = here - values[lane] - square / pivot
    for i in range(size - 2, -1, -1):
        here, square = diagonal[i], beside[i] * beside[i]
        before, now = up[(i + 1) * _LANES : (i + 2) * _LANES], up[i * _LANES : (i + 1) * _LANES]
        for lane in range(_LANES):
            pivot = before[lane] if abs(before[lane]) > least else least
            now[lane] = here - values[lane] - square / pivot


@njit(**_OPTIONS)
def solve(diagonal, beside, values, least, down, up, x, twists, sizes, vectors, columns, column):
    """The eigenvectors for the values of all lanes, as columns of float32 from one on.

    Source: twisted factorisations, Dhillon & Parlett 2004. Both factorisations meet at the row that has the
    smallest pivot then, where the vector is 1; from there on they give its other entries.

    Args:
        diagonal, beside: T.
        values: eigenvalues, one for each lane.
        least: a pivot as good as 0.
        down, up, x: room for [size, lanes].
        twists, sizes: room for [lanes].
        vectors: [size, columns]; lanes without a column are not written.
        columns, column: how many there are, and which is the first.
    """
    size = len(diagonal)
    factor(diagonal, beside, values, least, down, up)
    for lane in range(_LANES):
        smallest = np.inf
        for i in range(size):
            pivot = abs(down[i * _LANES + lane] + up[i * _LANES + lane] - (diagonal[i] - values[lane]))
            if pivot < smallest:
                smallest = pivot
                twists[lane] = i
        sizes[lane] = 0
    for lane in range(_LANES):
        x[(size - 1) * _LANES + lane] = 1.0
    for i in range(size - 2, -1, -1):
        for lane in range(_LANES):
            here = i * _LANES + lane
            pivot = down[here] if abs(down[here]) > least else least
            made = -beside[i] * x[here + _LANES] / pivot
            x[here] = 1.0 if i >= twists[lane] else (made if abs(made) > _NOTHING else 0.0)
    for i in range(size):
        for lane in range(_LANES):
            here = i * _LANES + lane
            if i > twists[lane]:
                pivot = up[here] if abs(up[here]) > least else least
                made = -beside[i - 1] * x[here - _LANES] / pivot
                x[here] = made if abs(made) > _NOTHING else 0.0
            sizes[lane] += x[here] * x[here]
    for i in range(size):
        for lane in range(min(_LANES, columns - column)):
            vectors[i * columns + column + lane] = x[i * _LANES + lane] / np.sqrt(sizes[lane])

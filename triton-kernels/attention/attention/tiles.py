"""What the attention steps in Gluon have in common: the tiles of keys that queries need, their softmax, the results.

A tile of queries is [64, D] for each consumer, a tile of keys or values [BLOCK_N, D]; D is padded with zeros to 64 or
128 by the copy engine. ``band`` is (Sk, first, last) throughout: query i sees the keys from i + first to i + last.
"""

from __future__ import annotations

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

WARPGROUP_M = gl.constexpr(64)  # queries of a consumer
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))
LN_2 = gl.constexpr(0.6931471805599453)
SMALLEST_FACTOR = 2.0**-126  # a scale of 0 becomes this: -inf * 0 would be NaN


def describe(name: str, heads: Tensor, rows: int) -> TensorDescriptor:
    """A tensor [B, heads, S, D] for the copy engine, in boxes of one head's rows. ValueError if it cannot take it."""
    D = heads.shape[3]
    # What a dimension of size 1 says of its stride is never used.
    pitches = [stride if size > 1 else D for size, stride in zip(heads.shape[:3], heads.stride()[:3], strict=True)]
    if heads.data_ptr() % 16 or any(pitch % 8 for pitch in pitches):
        raise ValueError(
            f"{name} has strides {heads.stride()} and starts {heads.data_ptr() % 16} bytes off a multiple of 16, "
            f"its rows must start at such multiples: call {name}.contiguous(), or take an earlier step"
        )
    box = [1, 1, rows, padded(D)]
    return TensorDescriptor(heads, list(heads.shape), [*pitches, 1], box, SWIZZLED.value)


def padded(D: int) -> int:
    """D up to the width of the swizzled panels that hold it."""
    return 64 if D <= 64 else 128


def factor_of(scale: float | None, D: int) -> float:
    """What turns a score into a power of 2, with the scale's sign; without a scale that of 1 / sqrt(D)."""
    scale = D**-0.5 if scale is None else scale
    return math.copysign(max(abs(scale) * math.log2(math.e), SMALLEST_FACTOR), scale)


def limits_of(band: tuple[int, int] | None, Sq: int, Sk: int) -> tuple[int, int]:
    """A band's limits in 32 bits: those that lie beyond every key bind no more there."""
    first, last = (max(-Sq, min(limit, Sk)) for limit in band or (-Sq, Sk))
    return first, last


@gluon.jit
def walk_of(first_row, Sq, band, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The tiles of keys that BLOCK_M queries from first_row on need, for tile_at, and how many: masked, and all."""
    Sk, first, last = band
    last_row = gl.minimum(first_row + BLOCK_M, Sq) - 1
    low = gl.maximum(first_row + first, 0)  # the first key that some row sees, and the last one
    high = gl.minimum(last_row + last, Sk - 1)
    all_low = gl.maximum(last_row + first, 0)  # those that all rows see
    all_high = gl.minimum(first_row + last, Sk - 1)
    begin = low // BLOCK_N
    end = gl.where(low <= high, high // BLOCK_N + 1, begin)
    clean = gl.minimum(gl.maximum(gl.cdiv(all_low, BLOCK_N), begin), end)
    clean_end = gl.minimum(gl.maximum((all_high + 1) // BLOCK_N, clean), end)
    masked = (end - begin) - (clean_end - clean)
    return (begin, clean, clean_end), masked, end - begin


@gluon.jit
def tile_at(walk, masked, i):
    """The i-th tile: first those that hide keys from some row, on both sides of the band, then those that hide none."""
    begin, clean, clean_end = walk
    edge = gl.where(i < clean - begin, begin + i, clean_end + i - (clean - begin))
    return gl.where(i >= masked, clean + i - masked, edge)


@gluon.jit
def accumulator(COLUMNS: gl.constexpr):
    """A consumer's [64, COLUMNS] of zeros, laid out as wgmma writes its results."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros((WARPGROUP_M, COLUMNS), gl.float32, layout)


@gluon.jit
def no_rows(scores):
    """Maxima and partial sums of rows that have met no key, for scores laid out like these."""
    layout: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    return gl.full((WARPGROUP_M,), -float("inf"), gl.float32, layout), partial_sums(gl.zeros_like(scores))


@gluon.jit
def rows_from(first_row, row_max):
    """The numbers of a consumer's rows, laid out as their maxima are."""
    return first_row + gl.arange(0, WARPGROUP_M, layout=row_max.type.layout)


@gluon.jit
def hide(scores, row, key, band, NEGATIVE: gl.constexpr):
    """Hides keys outside the band, and beyond the last one. A negative factor makes -inf of inf."""
    Sk, first, last = band
    column = key + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))[None, :]
    visible = (column >= (row + first)[:, None]) & (column <= gl.minimum(row + last, Sk - 1)[:, None])
    return gl.where(visible, scores, float("inf") if NEGATIVE else -float("inf"))


@gluon.jit
def largest(scores, factor, NEGATIVE: gl.constexpr):
    """The rows' maxima of scores * factor."""
    return (gl.min(scores, 1) if NEGATIVE else gl.max(scores, 1)) * factor


@gluon.jit
def exponentiate(scores, row_max, row_sum, factor, NEGATIVE: gl.constexpr):
    """Powers of 2 under the rows' new maxima, these, the sums, and what earlier powers are to be multiplied by."""
    # Maxima are kept as they were rounded: a factor for no growth is then 1, however many tiles follow.
    new_max = gl.maximum(row_max, largest(scores, factor, NEGATIVE))
    # While a row has seen no key, its sum must stay 0: -inf - -inf would make it NaN.
    base = gl.where(new_max == -float("inf"), 0.0, new_max)
    p = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(row_max - base)
    return p, new_max, times(row_sum, shrink) + partial_sums(p), shrink


@gluon.jit
def partial_sums(p):
    """[64, 4]: each thread's sums over its own columns, two of every eight, so that no tile takes a shuffle."""
    return gl.sum(gl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 4, 2), 3), 1)


@gluon.jit
def operand(p, total, dtype: gl.constexpr):
    """p rounded to dtype, as wgmma's left operand for total: it lies where the scores lay, so nothing moves."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, total.type.layout, 2), assert_trivial=True)


@gluon.jit
def times(values, rows):
    """values[i, :] * rows[i]. All layouts here give a row to the same threads, so nothing moves."""
    return values * gl.convert_layout(rows, gl.SliceLayout(1, values.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def settle(lse, total, row_max, row_sum, head, row, Sq):
    """Stores the logarithms of the rows' sums, and returns results divided by sums. Heads are counted over batches."""
    sums = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout, assert_trivial=True)
    gl.store(lse + head.to(gl.int64) * Sq + row, row_max * LN_2 + gl.log(sums), mask=row < Sq)
    return times(total, 1.0 / gl.where(sums == 0.0, 1.0, sums))  # a row that sees no key: 0, and -inf


@gluon.jit
def store(out, lse, total, row_max, row_sum, head, row, Sq, D: gl.constexpr):
    """Stores a consumer's rows of a head, counted over batches, from its registers."""
    total = settle(lse, total, row_max, row_sum, head, row, Sq)
    row = gl.convert_layout(row, gl.SliceLayout(1, total.type.layout), assert_trivial=True)[:, None]
    column = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))[None, :]
    rows = out + (head.to(gl.int64) * Sq + row) * D
    gl.store(rows + column, total.to(out.dtype.element_ty), mask=(row < Sq) & (column < D))

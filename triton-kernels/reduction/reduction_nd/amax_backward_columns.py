"""The gradient of a maximum, many outputs of few elements each: a lane has whole outputs, and lanes exchange nothing.

Outputs are numbered across all kept axes, as whole_columns.py does it for the maxima themselves. A lane walks an
output's elements twice: it marks by a bit of a word which of them equal the maximum, counts the bits, and writes dx.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.reduction.reduction_nd.amax_backward_bits import ones_of, share_of
from kernel_twins._triton.reduction.reduction_nd.whole_columns import column_of, next_of


@triton.jit
def amax_backward_columns_kernel(
    x, out, dout, ties, marks, dx, kept_sizes, kept_strides, kept_targets, kept_steps, sizes, strides, targets,
    outputs, elements, BLOCK: tl.constexpr, TURNS: tl.constexpr, VECTOR: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    # x: addressed by strides; dx: by targets; out, dout: by steps. One or two reduced axes, of up to 32 elements. ties
    # and marks, as the other kernel has them, are not used. ORDERED: out's elements lie in outputs' order.
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column // VECTOR < outputs // VECTOR
    from_, step = column_of(column, kept_sizes, kept_strides, kept_steps, VECTOR)
    to, _ = column_of(column, kept_sizes, kept_targets, kept_steps, VECTOR)
    if ORDERED:
        step = column
    largest = tl.load(out + step, mask=inside, other=float("nan"))
    bits = tl.zeros((BLOCK,), dtype=tl.uint32)
    at, element = tl.program_id(0) * 0, tl.program_id(0).to(tl.int64) * 0
    for start in tl.range(0, elements, TURNS):
        for turn in tl.static_range(TURNS):
            where = x + from_ + element // VECTOR * VECTOR
            known = inside & (start + turn < elements)
            is_largest = tl.load(where, mask=known, other=float("nan")) == largest
            bits |= is_largest.to(tl.uint32) << (start + turn)
            at, element = next_of(at, element, sizes, strides)
    share, nothing = share_of(dout, step, ones_of(bits), inside)
    at, element = tl.program_id(0) * 0, tl.program_id(0).to(tl.int64) * 0
    for start in tl.range(0, elements, TURNS):
        for turn in tl.static_range(TURNS):
            write = dx + to + element // VECTOR * VECTOR
            known = inside & (start + turn < elements)
            is_largest = ((bits >> (start + turn)) & 1) != 0
            tl.store(write, tl.where(is_largest, share, nothing), mask=known)
            at, element = next_of(at, element, sizes, targets)

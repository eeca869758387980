"""A norm's backward pass for short rows without a weight: chunks of a row lie side by side in a few warps' registers.

Without column sums no program has to stay, and each takes rows of its own, as the forward pass does. See
layer_norm/held_rows.py for how rows lie in lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.norm.layer_norm.held_rows import load_chunk, row_pointers, rows_at, store_chunk
from kernel_twins._triton.norm.layer_norm_backward.v02_persistent import row_sums
from kernel_twins._triton.norm.routing import Held


@triton.jit
def _loaded(rows, mask, CHUNKS: tl.constexpr, FULL: tl.constexpr):
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        tiles += (load_chunk(rows, chunk, mask, FULL, ""),)
    return tiles


@triton.jit
def norm_backward_held_rows_kernel(
    dout, x, mean, rstd, dadded, dx, M: tl.int64, N, stride_dm: tl.int64, stride_xm: tl.int64, stride_am: tl.int64,
    ROWS: tl.constexpr, TURNS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    # dout, x, dadded: [M, N]; mean, rstd: [M]; dx: [M, N] contiguous. Missing tensors are None. A program takes ROWS
    # rows at once, TURNS times, and asks for all of them before it computes.
    CENTERED: tl.constexpr = mean is not None
    first = tl.program_id(0).to(tl.int64) * (ROWS * TURNS)
    col = tl.arange(0, BLOCK_N)[None, :]
    # One comparison a vector, so that it is loaded as one.
    mask = (col + (CHUNKS - 1) * BLOCK_N) // VECTOR < N // VECTOR
    rows, gradients, values = (), (), ()
    for turn in tl.static_range(TURNS):
        row = rows_at(first + turn * ROWS, M, ROWS)
        rows += (row,)
        gradients += (_loaded(row_pointers(dout, row, stride_dm, col, VECTOR), mask, CHUNKS, FULL),)
        values += (_loaded(row_pointers(x, row, stride_xm, col, VECTOR), mask, CHUNKS, FULL),)
    for turn in tl.static_range(TURNS):
        row = rows[turn]
        row_mean = tl.load(mean + row) if CENTERED else 0.0
        row_rstd = tl.load(rstd + row)
        products = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        sums = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        for chunk in tl.static_range(CHUNKS):  # dout is 0 behind the row
            gradient = gradients[turn][chunk].to(tl.float32)
            products += gradient * ((values[turn][chunk].to(tl.float32) - row_mean) * row_rstd)
            sums += gradient
        if CENTERED:
            product_sum, gradient_sum = row_sums(products, sums)
        else:
            product_sum, gradient_sum = tl.sum(products, axis=1, keep_dims=True), 0.0
        product_mean, gradient_mean = product_sum / N, gradient_sum / N
        dx_rows = row_pointers(dx, row, N, col, VECTOR)
        for chunk in tl.static_range(CHUNKS):
            xhat = (values[turn][chunk].to(tl.float32) - row_mean) * row_rstd
            result = row_rstd * (gradients[turn][chunk].to(tl.float32) - gradient_mean - xhat * product_mean)
            if dadded is not None:
                added_rows = row_pointers(dadded, row, stride_am, col, VECTOR)
                result += load_chunk(added_rows, chunk, mask, FULL, "").to(tl.float32)
            store_chunk(dx_rows, chunk, result, mask, FULL)


def norm_backward_held_rows(
    route: Held, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], vector: int
) -> plans.Plan | None:
    """Launch the kernel on dout, x, mean, rstd, dadded and dx, and return the plan of it.

    ``sizes``: M, N, and the strides of rows of dout, x and dadded; ``vector``: elements of an access, of which N and
    the strides are multiples.
    """
    M, N, *_ = sizes
    return plans.launch(
        norm_backward_held_rows_kernel, (route.programs(M),), tensors, sizes, dict(route.constants(N, vector))
    )

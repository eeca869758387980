"""dropout_add_backward v05_dispatch: dx alone as the forward pass, and sums of columns of any length.

Change:   without dbias, elements are taken in the order of dx, as in dropout_add's v02. With it, a program has a strip
          of columns as in v02, of a width that wastes little at the row's end. If N is no multiple of 4, it takes rows
          of one skew within the random words' blocks of four, PERIOD rows apart, and counts its columns from the block
          in which a row begins. Few long rows are one chunk, whose sums are dbias. Accesses are as wide as N and the
          distance of a matrix's own rows allow, and whole blocks where its rows begin in them as those of dx do.
Why:      without dbias no thread has to keep its columns. In rows of 654 elements v02 leaves a third of a block of 1024
          idle, loads single elements, and draws eight words for four elements.
Counter:  time stays at rows of 4096, and falls without dbias, at other lengths, and at few long rows.
Requires: rows whose elements are contiguous, at any distance from each other.
Twin:     cuda-kernels/dropout/dropout_add_backward/v05_dispatch.cu
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.dropout.dropout_add.v02_four_words import _load
from kernel_twins._triton.dropout.philox import gradient, keeps, keeps_anywhere, numbers, places, span
from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm_backward.column_sums import add_up

BLOCK = 2_048  # elements of a program of dx alone
ELEMENTS = 8  # of a thread that sums columns, at once
WARPS, NARROW_WARPS = 8, 4  # of such a program, and of one whose accesses have less than 16 bytes
# Such programs an SM, and those with an activation, and narrow ones: as many as their registers leave room for.
PER_SM, SLOPES_PER_SM, NARROW_PER_SM = 4, 3, 6
FEW_ROWS = 64  # a program walks so few rows of one strip
WORDS = tl.constexpr(4)  # of a Philox block


@triton.jit
def _begin(row, stride, skew, WIDTH: tl.constexpr):
    # Of a row, counted from the block in which it begins. Written so that the compiler sees multiples of WIDTH.
    return (row * stride - skew) // WIDTH * WIDTH


@triton.jit
def _flat(
    dout, x, bias, dx, N, stride_dm, stride_xm, seed, offset, threshold, scale, first, mask, ALL: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, DOUT_WIDTH: tl.constexpr,
    X_WIDTH: tl.constexpr, DOUT_DENSE: tl.constexpr, X_DENSE: tl.constexpr,
):  # fmt: skip
    i = first + tl.arange(0, BLOCK)
    row, col = places(first, N, BLOCK, SPAN)
    values = _load(dout + i if DOUT_DENSE else dout + _begin(row, stride_dm, 0, DOUT_WIDTH) + col, mask)
    z = values  # unused without an activation
    if ACTIVATION != "none":
        z = _load(x + i if X_DENSE else x + _begin(row, stride_xm, 0, X_WIDTH) + col, mask)
        if bias is not None:  # every place of a block has a column
            z += tl.load(bias + col, eviction_policy="evict_last").to(tl.float32)
    kept = keeps(seed, offset, threshold, ALL, first // 4 + tl.arange(0, BLOCK // 4), BLOCK)
    values = tl.where(kept, gradient(values, z, scale, ACTIVATION), 0.0)
    tl.store(dx + i, values.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _read(matrix, stride, row, skew, place, mask, inside, M, N, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    # Of masked rows, those elements that are inside; or whole BLOCKS, so that elements of other rows lie beside.
    if BLOCKS:  # but for the one in which the matrix ends: what lies behind may be nobody's
        block, end = place // WORDS, N + skew
        mask = mask & ((block < end // WORDS) | ((block < (end - 1) // WORDS + 1) & (row < M - 1)))
    else:
        mask = mask & inside
    at = matrix + _begin(row, stride, skew, WIDTH) + place
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _with_rest(values, matrix, stride, row, skew, place, mask, inside, M, N):
    # The elements of the block in which the matrix ends, for which _read has no access of a whole one.
    mask = mask & inside & (row == M - 1) & (place // WORDS == (N + skew) // WORDS)
    return tl.where(mask, tl.load(matrix + (row * stride - skew) + place, mask=mask, other=0.0).to(tl.float32), values)


@triton.jit
def _columns(
    dout, x, bias, dx, sums_of, M, N, stride_dm, stride_xm, seed, offset, threshold, scale, chunk_rows,
    ALL: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PERIOD: tl.constexpr,
    DOUT_WIDTH: tl.constexpr, X_WIDTH: tl.constexpr, WIDTH: tl.constexpr, DOUT_BLOCKS: tl.constexpr,
    X_BLOCKS: tl.constexpr, IN_BLOCKS: tl.constexpr,
):  # fmt: skip
    strips = (N - 1 + (WORDS - 1 if PERIOD > 1 else 0)) // BLOCK_N + 1
    chunk = (tl.program_id(0) // strips).to(tl.int64)
    first_row, share = chunk % PERIOD, chunk // PERIOD  # of rows of one skew
    skew = (first_row * N % WORDS).to(tl.int32) if PERIOD > 1 else 0
    first = tl.program_id(0) % strips * BLOCK_N
    place = first + tl.arange(0, BLOCK_N)[None, :]  # a column, counted from the block in which a row begins
    # The same for WIDTH elements, so that they are moved by one access.
    inside = (place // WIDTH >= skew // WIDTH) & (place // WIDTH < (N + skew) // WIDTH)
    if bias is not None:
        shift = tl.load(bias - skew // WIDTH * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    end = tl.minimum((share + 1) * chunk_rows, tl.cdiv(M - first_row, PERIOD))
    for start in tl.range(share * chunk_rows, end, BLOCK_M):
        number = start + tl.arange(0, BLOCK_M)[:, None]
        row = first_row + number * PERIOD
        mask = number < end
        values = _read(dout, stride_dm, row, skew, place, mask, inside, M, N, DOUT_WIDTH, DOUT_BLOCKS)
        z = values  # unused without an activation
        if ACTIVATION != "none":
            z = _read(x, stride_xm, row, skew, place, mask, inside, M, N, X_WIDTH, X_BLOCKS)
        i = row * N - skew + first
        if IN_BLOCKS:
            kept = keeps(seed, offset, threshold, ALL, i // WORDS + tl.arange(0, BLOCK_N // WORDS)[None, :], BLOCK_N)
        else:
            four = i + WORDS * tl.arange(0, BLOCK_N // WORDS)[None, :]
            kept = keeps_anywhere(seed, offset, threshold, ALL, four, BLOCK_N)
        # After both reads, as a branch waits for the loads under way.
        if (DOUT_BLOCKS or X_BLOCKS) and first_row + (start + BLOCK_M - 1) * PERIOD >= M - 1:
            if DOUT_BLOCKS:
                values = _with_rest(values, dout, stride_dm, row, skew, place, mask, inside, M, N)
            if X_BLOCKS and ACTIVATION != "none":
                z = _with_rest(z, x, stride_xm, row, skew, place, mask, inside, M, N)
        if ACTIVATION != "none" and bias is not None:
            z += shift
        # Rows behind the last were read as 0, whose gradient is 0, too. What lies beside a row has sums that are not
        # stored.
        values = tl.where(kept, gradient(values, z, scale, ACTIVATION), 0.0)
        where = dx + _begin(row, N, skew, WIDTH) + place
        tl.store(where, values.to(dx.dtype.element_ty), mask=mask & inside)
        sums += values
    total = tl.sum(sums, axis=0, keep_dims=True).to(sums_of.dtype.element_ty)
    tl.store(sums_of + (chunk * N - skew) + place, total, mask=inside)


@triton.jit(do_not_specialize=["seed", "offset", "chunk_rows"])
def dropout_add_backward_v05_dispatch_kernel(
    dout, x, bias, dx, sums_of, M: tl.int64, N, stride_dm, stride_xm, seed, offset, threshold: tl.uint32, scale,
    chunk_rows, ALL: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PERIOD: tl.constexpr, DOUT_WIDTH: tl.constexpr, X_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    DOUT_BLOCKS: tl.constexpr, X_BLOCKS: tl.constexpr, IN_BLOCKS: tl.constexpr, SPAN: tl.constexpr,
    DOUT_DENSE: tl.constexpr, X_DENSE: tl.constexpr,
):  # fmt: skip
    # dout, x: [M, N]; bias: [N]; dx: [M, N] contiguous; sums_of: [chunks, N], or dbias. Missing tensors are None.
    if sums_of is not None:
        _columns(
            dout, x, bias, dx, sums_of, M, N, stride_dm, stride_xm, seed, offset, threshold, scale, chunk_rows, ALL,
            ACTIVATION, BLOCK_M, BLOCK_N, PERIOD, DOUT_WIDTH, X_WIDTH, WIDTH, DOUT_BLOCKS, X_BLOCKS, IN_BLOCKS,
        )  # fmt: skip
    else:
        first = tl.program_id(0).to(tl.int64) * BLOCK_N
        if first + BLOCK_N <= M * N:
            _flat(
                dout, x, bias, dx, N, stride_dm, stride_xm, seed, offset, threshold, scale, first, None, ALL,
                ACTIVATION, BLOCK_N, SPAN, DOUT_WIDTH, X_WIDTH, DOUT_DENSE, X_DENSE,
            )  # fmt: skip
        else:
            mask = first + tl.arange(0, BLOCK_N) < M * N
            _flat(
                dout, x, bias, dx, N, stride_dm, stride_xm, seed, offset, threshold, scale, first, mask, ALL,
                ACTIVATION, BLOCK_N, SPAN, DOUT_WIDTH, X_WIDTH, DOUT_DENSE, X_DENSE,
            )  # fmt: skip


class Tiling(NamedTuple):
    """A launch that sums columns: tiles of BLOCK_M rows, PERIOD apart, and ``chunk_rows`` of these a chunk."""

    BLOCK_M: int
    BLOCK_N: int
    PERIOD: int
    strips: int
    chunk_rows: int
    chunks: int
    num_warps: int


def tiling(M: int, N: int, sms: int, wide: bool, slopes: bool) -> Tiling:
    """One chunk of few long rows; else as many as run at once, of rows of one skew."""
    warps = WARPS if wide else NARROW_WARPS
    tile = 32 * warps * ELEMENTS
    if M <= FEW_ROWS and triton.cdiv(N, tile) >= sms:
        return Tiling(1, tile, 1, triton.cdiv(N, tile), M, 1, warps)
    period = WORDS.value // math.gcd(N, WORDS.value) if N < 2**30 else 1
    length, rows = N + (WORDS.value - 1 if period > 1 else 0), triton.cdiv(M, period)
    widths = [min(width, max(triton.next_power_of_2(length), 4)) for width in (1_024, 512, 256, 128)]
    least = min(triton.cdiv(length, width) * width for width in widths)
    width = next(each for each in widths if 16 * triton.cdiv(length, each) * each <= 17 * least)
    strips, height = triton.cdiv(length, width), tile // width
    programs = sms * (NARROW_PER_SM if not wide else SLOPES_PER_SM if slopes else PER_SM)
    chunk_rows = triton.cdiv(triton.cdiv(rows, max(programs // (strips * period), 1)), height) * height
    return Tiling(height, width, period, strips, chunk_rows, triton.cdiv(rows, chunk_rows) * period, warps)


def dropout_add_backward_v05_dispatch(
    dout: Tensor,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float = 0.5,
    activation: str = "none",
    seed: int | Tensor = 0,
    offset: int | None = 0,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """out = dx, or dx and dbias; fp32, bf16 or fp16.

    dout, x: [M, N], contiguous rows, x only with an activation; bias, dbias: [N]; dx: [M, N]. Where offset is None,
    seed holds both: [2], int64.
    """
    (M, N), (dx, *sums) = dout.shape, out if isinstance(out, tuple) else (out,)
    if M == 0 or N == 0:
        for each in sums:
            each.zero_()
        return
    threshold, scale, drops_all = numbers(p)
    strides = [N if M == 1 else each.stride(0) for each in (dout, x) if each is not None]
    aligned = all(each for each in plans.alignment(dout, x, dx) if each is not None)
    vector = 16 // dout.element_size()
    wide = aligned and math.gcd(vector, N, *strides) == vector
    way, partials = tiling(M, N, sm_count(dout.device), wide, x is not None), None
    # Rows that begin in a block of words where those of dx do are read in whole blocks. Shorter rows end more than one
    # row before such a block does.
    blocks = [
        aligned and bool(sums) and way.PERIOD > 1 and stride >= WORDS.value and (stride - N) % WORDS.value == 0
        for stride in strides
    ]
    widths = [
        WORDS.value if whole else math.gcd(vector, N, stride) for whole, stride in zip(blocks, strides, strict=True)
    ]
    if sums:
        dbias = sums[0]
        partials = dbias if way.chunks == 1 else torch.empty(way.chunks * N, dtype=torch.float32, device=dout.device)
    programs = way.strips * way.chunks if sums else triton.cdiv(M * N, BLOCK)
    block = way.BLOCK_N if sums else BLOCK
    dropout_add_backward_v05_dispatch_kernel[(programs,)](
        dout, x, bias, dx, partials, M, N, strides[0], strides[-1], seed, offset, threshold, scale, way.chunk_rows,
        ALL=drops_all, ACTIVATION=activation, BLOCK_M=way.BLOCK_M, BLOCK_N=block, PERIOD=way.PERIOD,
        DOUT_WIDTH=widths[0], X_WIDTH=widths[-1], WIDTH=math.gcd(vector, N), DOUT_BLOCKS=blocks[0], X_BLOCKS=blocks[-1],
        IN_BLOCKS=way.PERIOD > 1 or N % WORDS.value == 0, SPAN=span(N, block), DOUT_DENSE=strides[0] == N,
        X_DENSE=strides[-1] == N, num_warps=way.num_warps if sums else BLOCK // (32 * 16),
    )  # fmt: skip
    if sums and way.chunks > 1:
        assert partials is not None
        add_up(partials.view(1, way.chunks, N), *sums)

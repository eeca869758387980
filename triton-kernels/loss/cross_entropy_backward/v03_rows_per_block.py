"""cross_entropy_backward v03_rows_per_block: a program takes one tile: a part of a row, or several short rows.

Change:   every program has a tile of TILE_BYTES: a part of one row, or several rows if they are shorter. Tile size and
          number of warps are searched over the list below (see tuning.py). Rows of half precision whose length or
          distance is no multiple of 16 elements are packed_rows.py's.
Why:      a program that ends after one tile makes room for another, whose loads overlap with its stores, while a
          program that walks along a row waits at every step. A single short row would leave threads without work.
Counter:  dram_share rises.
Requires: rows whose elements are contiguous, at any distance from each other. out may be the logits.
Twin:     cuda-kernels/loss/cross_entropy_backward/v03_rows_per_block.cu
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans, tuning
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.loss.cross_entropy_backward.packed_rows import (
    cross_entropy_backward_packed_rows,
    packed,
)

NARROW = 2  # bytes of an element; neighbouring lanes with one of four bytes each fill a sector as well as packs do
SEEN = 16  # what N and the rows' distances must be multiples of for the compiler to see 16 bytes
MOST_PACKED = 2**30  # elements of a row that packed_rows.py counts in 32 bits

LOG2_E = tl.constexpr(1.4426950408889634)

CONFIGS = [
    triton.Config({"TILE_BYTES": size}, num_warps=warps)
    for size, warps in (
        (8192, 4), (2048, 1), (4096, 2), (4096, 4), (8192, 2), (8192, 8), (16384, 4), (16384, 8), (32768, 8),
        (32768, 16),
    )
]  # fmt: skip


def tile_of(args: dict[str, Any]) -> int:
    """Elements of a tile."""
    return args["TILE_BYTES"] // args["logits"].element_size()


def width_of(args: dict[str, Any], matrix: str, stride: str) -> int:
    """Elements of an access that the kernel has to spell out; 1 if there are none, or the compiler sees them."""
    N, distance, itemsize = args["N"], args[stride], args[matrix].element_size()
    if args[matrix].data_ptr() % 16 or (N % 16 == 0 and distance % 16 == 0):
        return 1
    return math.gcd(16 // itemsize, N, distance)


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "BLOCK_N": lambda args: min(triton.next_power_of_2(args["N"]), tile_of(args)),
        "ROWS": lambda args: tile_of(args) // args["BLOCK_N"],
        "READ": lambda args: width_of(args, "logits", "stride_lm"),
        "WRITTEN": lambda args: width_of(args, "out", "stride_om"),
    }
)
@triton.jit
def cross_entropy_backward_v03_rows_per_block_kernel(
    logits, target, lse, dout, out, M, N, stride_lm, stride_dm, stride_om, ignore_index: tl.int64, smoothing,
    TILE_BYTES: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    # logits, out: [M, N]; target, lse, dout: [M]. Offsets of rows have 64 bits. N and the rows' distance are multiples
    # of READ and WRITTEN, the elements of an access, and a mask is the same for so many.
    parts = tl.cdiv(N, BLOCK_N)
    row = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % parts * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (row < M)[:, None] & (col // READ < N // READ)
    values = tl.load(logits + (row * (stride_lm // READ) * READ)[:, None] + col, mask=mask).to(tl.float32)
    row_class = tl.load(target + row, mask=row < M, other=0)
    row_lse, scale = tl.load(lse + row, mask=row < M), tl.load(dout + row * stride_dm, mask=row < M)
    # A target that is no class makes the whole row NaN, as it makes the loss.
    scale = tl.where((row_class >= 0) & (row_class < N), scale, float("nan"))
    shared = smoothing / N
    wanted = tl.where(col == row_class[:, None], shared + (1.0 - smoothing), shared)
    values = (tl.exp2((values - row_lse[:, None]) * LOG2_E) - wanted) * scale[:, None]
    values = tl.where((row_class == ignore_index)[:, None], 0.0, values)
    mask = (row < M)[:, None] & (col // WRITTEN < N // WRITTEN)
    where = out + (row * (stride_om // WRITTEN) * WRITTEN)[:, None] + col
    tl.store(where, values.to(out.dtype.element_ty), mask=mask)


_plans: dict[tuple[Any, ...], plans.Plan] = {}


def cross_entropy_backward_v03_rows_per_block(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    out: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> None:
    """out = the gradient of logits, [M, N], contiguous rows, from the losses': dout, [M]; target, lse: [M]."""
    tensors, options = (logits, target, lse, dout, out), (ignore_index, label_smoothing)
    strides, in_place = (logits.stride(0), dout.stride(0), out.stride(0)), out.data_ptr() == logits.data_ptr()
    aligned, device = plans.alignment(*tensors), logits.get_device()
    key = logits.shape, strides, logits.dtype, dout.dtype, aligned, options, in_place, device
    plan = _plans.get(key)
    if plan is not None and not tuning.is_recording():
        plan(*tensors)
        return
    M, N = logits.shape
    if M == 0 or N == 0:
        return
    pitch_l, pitch_d, pitch_o = (N if M == 1 else strides[0], strides[1], N if M == 1 else strides[2])
    seen = aligned[0] and aligned[4] and N % SEEN == pitch_l % SEEN == pitch_o % SEEN == 0
    if logits.element_size() <= NARROW and not seen and N < MOST_PACKED and not tuning.is_recording():
        way = packed(
            M, N, logits.element_size(), (pitch_l, pitch_o), (aligned[0] is True, aligned[4] is True),
            sm_count(logits.device),
        )  # fmt: skip
        plan = cross_entropy_backward_packed_rows(way, tensors, (M, N, pitch_l, pitch_d, pitch_o), options)
        if plan is not None:
            plans.keep(_plans, key, plan)
        return
    problem = tuning.problem_of(M, N, dtype=logits.dtype)
    step = "cross_entropy_backward/v03_rows_per_block"
    searched = cross_entropy_backward_v03_rows_per_block_kernel
    kernel, config = tuning.choose(searched, step, problem, logits.device)
    grid = lambda args: (triton.cdiv(M, args["ROWS"]) * triton.cdiv(N, args["BLOCK_N"]),)  # noqa: E731
    behind = M, N, *strides, *options
    if not config and in_place:
        # No search in place: it runs the kernel several times, and the first run would overwrite the logits.
        kernel, config = searched.fn, searched.configs[0].all_kwargs()
    elif not config:
        kernel[grid](*tensors, *behind)
        kernel, config = kernel.fn, kernel.best_config.all_kwargs()
    plan = plans.launch(kernel, grid, tensors, behind, config)
    if plan is not None:
        plans.keep(_plans, key, plan)

"""dropout_add v01_scalar: every element draws four words, and uses one of them.

Change:   none yet, this is where the ladder starts. A program takes a block of elements, wherever rows begin and end.
Why:      the definition, word for word: an element's number says which Philox block its word is in. The three other
          words of the block are thrown away, after ten rounds of two wide products each.
Counter:  dram_share is high all the same: where the compiler knows that rows begin at multiples of 16 bytes, it gives a
          thread eight neighbours, and makes one call of every four equal ones.
Requires: rows whose elements are contiguous, at any distance from each other.
Twin:     cuda-kernels/dropout/dropout_add/v01_scalar.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.dropout.philox import activate, keeps_each, numbers, places

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["seed", "offset"])
def dropout_add_v01_scalar_kernel(
    x, residual, bias, out, M: tl.int64, N, stride_xm, stride_rm, seed, offset, threshold: tl.uint32, scale,
    ALL: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; bias: [N]; out: [M, N] contiguous. Missing tensors are None. Elements are counted in 64
    # bits.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    mask = i < M * N
    row, col = places(first, N, BLOCK, 1)
    values = tl.load(x + row * stride_xm + col, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        values += tl.load(bias + col, mask=mask, other=0.0).to(tl.float32)
    values = activate(values, ACTIVATION, out.dtype.element_ty == tl.float32) * scale
    # Dropped is dropped, NaN too.
    values = tl.where(keeps_each(seed, offset, threshold, ALL, i), values, 0.0)
    if residual is not None:
        values += tl.load(residual + row * stride_rm + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + i, values.to(out.dtype.element_ty), mask=mask)


def dropout_add_v01_scalar(
    x: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float = 0.5,
    activation: str = "none",
    seed: int | Tensor = 0,
    offset: int | None = 0,
    out: Tensor,
) -> None:
    """out = dropout(activation(x + bias)) + residual; fp32, bf16 or fp16.

    x, residual: [M, N], contiguous rows; bias: [N]; out: [M, N]. Where offset is None, seed holds both: [2], int64.
    """
    M, N = x.shape
    if M == 0 or N == 0:
        return
    threshold, scale, drops_all = numbers(p)
    dropout_add_v01_scalar_kernel[(triton.cdiv(M * N, BLOCK),)](
        x, residual, bias, out, M, N, x.stride(0), 0 if residual is None else residual.stride(0), seed, offset,
        threshold, scale, ALL=drops_all, ACTIVATION=activation, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip

"""dropout_add v02_four_words: the four words of a call are those of four neighbours.

Change:   a program makes a quarter as many Philox calls as it has elements, and lays their words side by side. Elements
          that lie end to end in memory are addressed by their number, and without a bias no column is computed. The
          block and the number of warps are searched over the list below (see tuning.py).
Why:      a quarter of the random numbers' work, whatever the compiler recognises. Elements addressed by their number
          have 16 bytes an access wherever the compiler knows that they begin at multiples of 16 bytes.
Counter:  time falls in rows of odd length; elsewhere the compiler did most of it in v01, and time rises a little.
Requires: rows whose elements are contiguous, at any distance from each other; end to end, loads take 16 bytes.
Twin:     cuda-kernels/dropout/dropout_add/v02_four_words.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.dropout.philox import activate, keeps, numbers, places, span
from kernel_twins._triton.lib import tuning

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in ((1024, 4), (2048, 8), (2048, 4), (4096, 8), (512, 2))
]


@triton.jit
def _load(places, mask):
    # With a mask that may end anywhere the compiler takes one element an access, so whole blocks have no mask.
    if mask is None:
        values = tl.load(places, eviction_policy="evict_first")
    else:
        values = tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")
    return values.to(tl.float32)


@triton.jit
def _block(
    x, residual, bias, out, N, stride_xm, stride_rm, seed, offset, threshold, scale, first, mask, ALL: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, X_DENSE: tl.constexpr,
    RESIDUAL_DENSE: tl.constexpr,
):  # fmt: skip
    i = first + tl.arange(0, BLOCK)
    row, col = places(first, N, BLOCK, SPAN)
    values = _load(x + i if X_DENSE else x + row * stride_xm + col, mask)
    if bias is not None:  # every place of a block has a column
        values += tl.load(bias + col, eviction_policy="evict_last").to(tl.float32)
    values = activate(values, ACTIVATION, out.dtype.element_ty == tl.float32) * scale
    kept = keeps(seed, offset, threshold, ALL, first // 4 + tl.arange(0, BLOCK // 4), BLOCK)
    values = tl.where(kept, values, 0.0)  # NaN too
    if residual is not None:
        values += _load(residual + i if RESIDUAL_DENSE else residual + row * stride_rm + col, mask)
    tl.store(out + i, values.to(out.dtype.element_ty), mask=mask)


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "SPAN": lambda args: span(args["N"], args["BLOCK"]),
        "X_DENSE": lambda args: args["M"] == 1 or args["stride_xm"] == args["N"],
        "RESIDUAL_DENSE": lambda args: args["M"] == 1 or args["stride_rm"] == args["N"],
    }
)
@triton.jit(do_not_specialize=["seed", "offset"])
def dropout_add_v02_four_words_kernel(
    x, residual, bias, out, M: tl.int64, N, stride_xm, stride_rm, seed, offset, threshold: tl.uint32, scale,
    ALL: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, X_DENSE: tl.constexpr,
    RESIDUAL_DENSE: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; bias: [N]; out: [M, N] contiguous. Missing tensors are None. Elements are counted in 64
    # bits.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first + BLOCK <= M * N:
        _block(
            x, residual, bias, out, N, stride_xm, stride_rm, seed, offset, threshold, scale, first, None, ALL,
            ACTIVATION, BLOCK, SPAN, X_DENSE, RESIDUAL_DENSE,
        )  # fmt: skip
    else:
        mask = first + tl.arange(0, BLOCK) < M * N
        _block(
            x, residual, bias, out, N, stride_xm, stride_rm, seed, offset, threshold, scale, first, mask, ALL,
            ACTIVATION, BLOCK, SPAN, X_DENSE, RESIDUAL_DENSE,
        )  # fmt: skip


def dropout_add_v02_four_words(
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
    problem, step = tuning.problem_of(M, N, dtype=x.dtype), "dropout_add/v02_four_words"
    kernel, config = tuning.choose(dropout_add_v02_four_words_kernel, step, problem, x.device)
    kernel[lambda args: (triton.cdiv(M * N, args["BLOCK"]),)](
        x, residual, bias, out, M, N, x.stride(0), 0 if residual is None else residual.stride(0), seed, offset,
        threshold, scale, ALL=drops_all, ACTIVATION=activation, **config,
    )  # fmt: skip

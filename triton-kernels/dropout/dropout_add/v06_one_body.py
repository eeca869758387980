"""dropout_add v06_one_body: whole blocks and the last one share their code, but for loads and stores.

Change:   each load and each store asks whether the block is whole; v02 compiles everything twice. There is no
          activation. The block and the number of warps are searched over the list below (see tuning.py).
Why:      a branch that all threads take alike costs next to nothing, and the code is half as long: one file holds it.
Counter:  time and instructions stay.
Requires: rows whose elements are contiguous, at any distance from each other; end to end, loads take 16 bytes.
Twin:     none, see the spec
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in ((4096, 8), (2048, 8), (2048, 4), (1024, 4), (512, 2))
]


@triton.jit
def _load(places, mask, whole):
    # With a mask that may end anywhere the compiler takes one element an access.
    if whole:
        values = tl.load(places, eviction_policy="evict_first")
    else:
        values = tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")
    return values


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "ENDS_ONCE": lambda args: args["BLOCK"] <= args["N"],
        "X_DENSE": lambda args: args["M"] == 1 or args["stride_xm"] == args["N"],
        "RESIDUAL_DENSE": lambda args: args["M"] == 1 or args["stride_rm"] == args["N"],
    }
)
@triton.jit(do_not_specialize=["seed", "offset"])
def dropout_add_v06_one_body_kernel(
    x, residual, bias, out, M: tl.int64, N, stride_xm, stride_rm, seed, offset, threshold: tl.uint32, scale,
    ALL: tl.constexpr, BLOCK: tl.constexpr, ENDS_ONCE: tl.constexpr, X_DENSE: tl.constexpr,
    RESIDUAL_DENSE: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; bias: [N]; out: [M, N] contiguous. Missing tensors are None. Elements have 64-bit numbers.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    along = tl.arange(0, BLOCK)
    i, whole = first + along, first + BLOCK <= M * N
    mask = i < M * N
    row = first // N
    along += (first - row * N).to((along + N).dtype)  # of 64 bits where N is
    if ENDS_ONCE:  # one row at most, so nothing is divided
        row, col = row + (along >= N).to(tl.int32), tl.where(along >= N, along - N, along)
    else:
        row, col = row + along // N, along % N
    # The compiler moves no load across a branch, so both come first: words are drawn while memory answers.
    values = _load(x + i if X_DENSE else x + row * stride_xm + col, mask, whole)
    if residual is not None:
        added = _load(residual + i if RESIDUAL_DENSE else residual + row * stride_rm + col, mask, whole)

    # Element i has word i % 4 of Philox block i / 4. Its counter is (offset / 4, block), its key the seed.
    block, start = first // 4 + tl.arange(0, BLOCK // 4), offset.to(tl.uint64) >> 2
    w0, w1, w2, w3 = tl.philox(
        seed, start.to(tl.uint32), (start >> 32).to(tl.uint32), block.to(tl.uint32), (block >> 32).to(tl.uint32)
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([BLOCK])  # side by side: word / 2, then word % 2

    values = values.to(tl.float32)
    if bias is not None:  # every place of a block has a column
        values += tl.load(bias + col, eviction_policy="evict_last").to(tl.float32)
    values = tl.where((words >= threshold) & (not ALL), values * scale, 0.0)  # dropped is dropped, NaN too
    if residual is not None:
        values += added.to(tl.float32)
    if whole:
        tl.store(out + i, values.to(out.dtype.element_ty))
    else:
        tl.store(out + i, values.to(out.dtype.element_ty), mask=mask)


def dropout_add_v06_one_body(
    x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None, *, out: Tensor,
    p: float = 0.5, activation: str = "none", seed: int = 0, offset: int = 0,
) -> None:  # fmt: skip
    """out = dropout(x + bias) + residual; x, residual: [M, N], contiguous rows; bias: [N]; fp32, bf16 or fp16."""
    if activation != "none":
        raise ValueError(f"activation is '{activation}', must be none: take v02_four_words, or apply it before")
    M, N = x.shape
    if M == 0 or N == 0:
        return
    kernel, config = tuning.choose(
        dropout_add_v06_one_body_kernel, "dropout_add/v06_one_body", tuning.problem_of(M, N, dtype=x.dtype), x.device
    )
    kernel[lambda args: (triton.cdiv(M * N, args["BLOCK"]),)](
        x, residual, bias, out, M, N, x.stride(0), 0 if residual is None else residual.stride(0), seed, offset,
        int(p * 2**32) % 2**32, 1 / (1 - p) if p < 1 else 0.0, ALL=p == 1, **config,
    )  # fmt: skip

"""matmul_bf16 v11_persistent: persistent programs walk over the tiles of the output.

Change:   there are as many programs as SMs can hold, each computes every so many-th tile, and flatten makes one loop of
          the loop over tiles and the loop over steps.
Why:      a program's start, its first fetches and its descriptors are paid once. In the one loop the fetches for
          the next tile start while this one's last products run, and arrive while it is written.
Counter:  time falls; tensor_pipe rises.
Requires: as its twin, in the ladder. The kernel serves more: an operand that descriptors cannot take (neighbours along
          neither rows nor columns, an address or a pitch that is no multiple of 16 bytes) is fetched through masked
          pointers.
Twin:     cuda-kernels/matmul/matmul_bf16/v11_persistent.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.device import layout_of, scratch, sm_count

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 128, 8, 2),
        (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4),
    )
]  # fmt: skip


@triton.autotune(
    CONFIGS,
    key=["M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn"],
    prune_configs_by={"early_config_prune": tuning.likely(6)},
    cache_results=True,
    do_bench=tuning.bench,
)
@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})
@triton.jit
def matmul_bf16_v11_persistent_kernel(
    a, b, out, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, A_LAYOUT: tl.constexpr, B_LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], out: [M, N] row-major. The copy engine counts in 32 bits, pointers in 64. What is
    # column-major is described as its transpose.
    if A_LAYOUT == "row":
        a_desc = tl.make_tensor_descriptor(a, [M, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
    if A_LAYOUT == "col":
        a_desc = tl.make_tensor_descriptor(a, [K, M], [stride_ak, 1], [BLOCK_K, BLOCK_M])
    if B_LAYOUT == "row":
        b_desc = tl.make_tensor_descriptor(b, [K, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
    if B_LAYOUT == "col":
        b_desc = tl.make_tensor_descriptor(b, [N, K], [stride_bn, 1], [BLOCK_N, BLOCK_K])

    tiles_m = (M - 1) // BLOCK_M + 1
    tiles_n = (N - 1) // BLOCK_N + 1
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        # Within a group the tile's row varies fastest; the last group may have fewer rows.
        group = tile // (GROUP_M * tiles_n)
        within = tile % (GROUP_M * tiles_n)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        tile_m = group * GROUP_M + within % group_rows
        tile_n = within // group_rows
        first_row, first_col = (tile_m * BLOCK_M).to(tl.int32), (tile_n * BLOCK_N).to(tl.int32)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range((K - 1) // BLOCK_K + 1):
            first_k = step * BLOCK_K
            # Computed inside the loop: values that a flattened loop carries lose their known alignment, and loads their
            # width.
            row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
            col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            k = step * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
            if A_LAYOUT == "row":
                a_tile = a_desc.load([first_row, first_k])
            elif A_LAYOUT == "col":
                a_tile = a_desc.load([first_k, first_row]).T
            else:
                a_mask = row < M if EVEN_K else (row < M) & (k[None, :] < K)
                a_tile = tl.load(a + row * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0)
            if B_LAYOUT == "row":
                b_tile = b_desc.load([first_k, first_col])
            elif B_LAYOUT == "col":
                b_tile = b_desc.load([first_col, first_k]).T
            else:
                b_mask = col < N if EVEN_K else (k[:, None] < K) & (col < N)
                b_tile = tl.load(b + k[:, None] * stride_bk + col * stride_bn, mask=b_mask, other=0.0)
            total = tl.dot(a_tile, b_tile, total)
        row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(out + row * N + col, total.to(out.dtype.element_ty), mask=(row < M) & (col < N))


def matmul_bf16_v11_persistent(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; all bf16 or all fp16."""
    (M, K), N = a.shape, b.shape[1]
    if min(M, N, K) == 0:  # a flattened loop takes at least one step, so K = 0 is not for it
        out.zero_()
        return

    def grid(args: dict[str, int]) -> tuple[int]:
        tiles = triton.cdiv(M, args["BLOCK_M"]) * triton.cdiv(N, args["BLOCK_N"])
        programs_per_sm = max(1, 128 * 128 // (args["BLOCK_M"] * args["BLOCK_N"]))
        return (min(tiles, programs_per_sm * sm_count(a.device)),)

    a_layout, b_layout = layout_of(a), layout_of(b)
    problem = tuning.problem_of(M, N, K, dtype=a.dtype, **tuning.layouts(a=a_layout, b=b_layout))
    kernel, config = tuning.choose(matmul_bf16_v11_persistent_kernel, "matmul_bf16/v11_persistent", problem, a.device)
    triton.set_allocator(scratch)
    kernel[grid](a, b, out, M, N, K, *a.stride(), *b.stride(), A_LAYOUT=a_layout, B_LAYOUT=b_layout, **config)

"""matmul_bf16 v06_autotuned: tile shape, warps and pipeline stages are searched over a short list.

Change:   the list below is searched (see tuning.py). Tiles come through tensor descriptors, several steps ahead, and
          programs walk over many tiles of the output: flatten lets the next tile's fetches start during this one.
Why:      a tile of 128 x 256 does more products per byte fetched, and the stages hide the fetch behind them.
Counter:  time; tensor_pipe should pass 70 %.
Requires: nothing of sizes and strides. An operand that descriptors cannot take is fetched through masked pointers.
Twin:     none, see the spec
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.testing import do_bench_cudagraph

from kernel_twins._triton import tuning
from kernel_twins._triton.device import describe, sm_count

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 128, 8, 2),
        (64, 256, 64, 4, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3),
    )
]  # fmt: skip


@triton.autotune(
    CONFIGS,
    key=["M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn"],
    cache_results=True,
    do_bench=do_bench_cudagraph,  # launched one by one, a small product's time would be the host's
)
@triton.heuristics(  # a descriptor holds its tile's shape, so it is made anew for every configuration that is tried
    {
        "a_desc": lambda args: describe(args["a"], args["BLOCK_M"], args["BLOCK_K"]),
        "b_desc": lambda args: describe(args["b"], args["BLOCK_K"], args["BLOCK_N"]),
        "bt_desc": lambda args: describe(args["b"].t(), args["BLOCK_N"], args["BLOCK_K"]),
        "out_desc": lambda args: describe(args["out"], args["BLOCK_M"], args["BLOCK_N"]),
        "EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0,
    }
)
@triton.jit
def matmul_bf16_v06_autotuned_kernel(
    a, b, out, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, a_desc, b_desc, bt_desc, out_desc,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], bt: [N, K], out: [M, N] row-major. The copy engine counts in 32 bits, pointers in 64.
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
            # Computed here, not above: what a flattened loop carries along loses its alignment, and loads their width.
            row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
            col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            k = step * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
            if a_desc is not None:
                a_tile = a_desc.load([first_row, first_k])
            else:
                a_mask = row < M if EVEN_K else (row < M) & (k[None, :] < K)
                a_tile = tl.load(a + row * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0)
            if b_desc is not None:
                b_tile = b_desc.load([first_k, first_col])
            elif bt_desc is not None:
                b_tile = bt_desc.load([first_col, first_k]).T
            else:
                b_mask = col < N if EVEN_K else (k[:, None] < K) & (col < N)
                b_tile = tl.load(b + k[:, None] * stride_bk + col * stride_bn, mask=b_mask, other=0.0)
            total = tl.dot(a_tile, b_tile, total)
        if out_desc is not None:
            out_desc.store([first_row, first_col], total.to(out.dtype.element_ty))
        else:
            row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
            col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(out + row * N + col, total.to(out.dtype.element_ty), mask=(row < M) & (col < N))


def matmul_bf16_v06_autotuned(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; all bf16 or all fp16."""
    (M, K), N = a.shape, b.shape[1]
    if min(M, N, K) == 0:  # a flattened loop takes at least one step, so K = 0 is not for it
        out.zero_()
        return

    def grid(args: dict[str, int]) -> tuple[int]:
        tiles = triton.cdiv(M, args["BLOCK_M"]) * triton.cdiv(N, args["BLOCK_N"])
        programs_per_sm = max(1, 128 * 128 // (args["BLOCK_M"] * args["BLOCK_N"]))
        return (min(tiles, programs_per_sm * sm_count(a.device)),)

    problem = tuning.problem_of(M, N, K, dtype=a.dtype, **tuning.layouts(a=a, b=b))
    kernel, config = tuning.choose(matmul_bf16_v06_autotuned_kernel, "matmul_bf16/v06_autotuned", problem, a.device)
    kernel[grid](a, b, out, M, N, K, *a.stride(), *b.stride(), **config)

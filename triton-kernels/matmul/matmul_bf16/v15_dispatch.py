"""matmul_bf16 v15_dispatch: every shape gets the tile, and the number of programs, that suits it.

Change:   the list has small tiles for few rows or columns, and SPLIT_K: where tiles are few, several programs share the
          steps of a tile. Each writes its sums to a workspace, and the last to arrive adds them up, always in the same
          order. An operand that descriptors cannot take is copied to rows that they can. A launch cache keeps the
          choice for each shape.
Why:      16 x 14336 or 4096 x 512 has fewer large tiles than the GPU has SMs. Masked pointers fetch an odd pitch two
          bytes at a time, for every tile again; the copy does so once, and the product runs as for even sizes.
Counter:  time at small, flat and odd sizes falls; at 4096 x 4096 all stays.
Requires: compute capability 9.0; nothing of sizes and strides.
Twin:     cuda-kernels/matmul/matmul_bf16/v15_dispatch.cu
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.device import has_tma, layout_of, scratch, sm_count
from kernel_twins._triton.lib.workspace import COUNTERS, counter

SMALL = 2**31  # multiply-adds up to which descriptors may cost more time than they save
PITCH = 64  # a copy's pitch is a multiple of so many elements: 128 bytes
PLANS = 4096  # entries of the launch cache

CONFIGS = [
    triton.Config(
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "SPLIT_K": parts, "TMA": tma},
        num_warps=warps, num_stages=stages,
    )
    for m, n, k, warps, stages, parts, tma in (
        (128, 128, 64, 8, 3, 1, True), (128, 256, 64, 8, 4, 1, True), (128, 256, 64, 8, 3, 1, True),
        (256, 128, 64, 8, 4, 1, True),
        (128, 128, 64, 4, 3, 1, True), (64, 256, 64, 4, 4, 1, True), (128, 64, 64, 4, 4, 1, True),
        (64, 128, 128, 4, 3, 1, True), (64, 64, 128, 4, 4, 1, True),
        (128, 256, 64, 8, 4, 2, True), (128, 128, 64, 8, 4, 2, True), (128, 128, 64, 8, 4, 4, True),
        (128, 64, 64, 4, 5, 2, True), (64, 256, 64, 4, 4, 4, True), (64, 128, 128, 4, 3, 2, True),
        (64, 128, 128, 4, 3, 4, True), (64, 64, 128, 4, 4, 2, True), (64, 64, 128, 4, 4, 4, True),
        (128, 64, 64, 4, 4, 1, False), (64, 128, 64, 4, 4, 1, False), (64, 64, 64, 4, 5, 1, False),
        (64, 64, 64, 4, 5, 4, False),
    )
]  # fmt: skip


def tiles_of(M: int, N: int, config: dict[str, Any]) -> int:
    return triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])


def worth_timing(configs: list[triton.Config], args: dict[str, Any], **meta: Any) -> list[triton.Config]:
    """Pointers for small products only, SPLIT_K where tiles are few; of those the six with the best estimates."""
    M, N, K, sms = args["M"], args["N"], args["K"], sm_count(args["a"].device)
    fit = [
        config
        for config in configs
        if (config.kwargs["TMA"] or M * N * K <= SMALL)
        and (config.kwargs["SPLIT_K"] == 1 or tiles_of(M, N, config.kwargs) <= sms)
    ]
    return tuning.likely(6)(fit, args)


@triton.jit
def _halves(tile):
    # [BLOCK_M, 2, BLOCK_N / 2], with the halves last for split: no element changes its thread.
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _store_part(part, out, out_desc, M, N, first_row, first_col):
    part = part.to(out.dtype.element_ty)
    if out_desc is not None:
        out_desc.store([first_row.to(tl.int32), first_col.to(tl.int32)], part)
    else:
        row = first_row + tl.arange(0, part.shape[0])[:, None]
        col = first_col + tl.arange(0, part.shape[1])[None, :]
        tl.store(out + row * N + col, part, mask=(row < M) & (col < N))


@triton.jit
def _store(total, out, out_desc, M, N, tile_m, tile_n):
    # total: [BLOCK_M, BLOCK_N], of out: [M, N]. Stores by descriptor take halves of 16-bit elements and quarters of
    # fp32, which need the same shared memory; stores by pointers take quarters, for which there are registers.
    first_row, first_col = tile_m.to(tl.int64) * total.shape[0], tile_n.to(tl.int64) * total.shape[1]
    HALF: tl.constexpr = total.shape[1] // 2
    QUARTER: tl.constexpr = total.shape[1] // 4
    left, right = _halves(total)
    if out_desc is not None and out.dtype.element_ty != tl.float32:
        _store_part(left, out, out_desc, M, N, first_row, first_col)
        _store_part(right, out, out_desc, M, N, first_row, first_col + HALF)
    else:
        first, second = _halves(left)
        third, fourth = _halves(right)
        _store_part(first, out, out_desc, M, N, first_row, first_col)
        _store_part(second, out, out_desc, M, N, first_row, first_col + QUARTER)
        _store_part(third, out, out_desc, M, N, first_row, first_col + HALF)
        _store_part(fourth, out, out_desc, M, N, first_row, first_col + HALF + QUARTER)


@triton.autotune(
    CONFIGS,
    key=["M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn", "OUT_LAYOUT"],
    prune_configs_by={"early_config_prune": worth_timing},
    cache_results=True,
    do_bench=tuning.bench,
)
@triton.heuristics({"EVEN_K": lambda args: args["K"] % (args["BLOCK_K"] * args["SPLIT_K"]) == 0})
@triton.jit
def matmul_bf16_v15_dispatch_kernel(
    a, b, out, sums, tickets, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    A_LAYOUT: tl.constexpr, B_LAYOUT: tl.constexpr, OUT_LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], out: [M, N] row-major; for SPLIT_K > 1 sums: [tiles, SPLIT_K, BLOCK_M, BLOCK_N] and tickets:
    # [tiles]. The copy engine counts in 32 bits, pointers in 64. What is column-major is described as its transpose.
    A_FROM: tl.constexpr = A_LAYOUT if TMA else "pointers"
    B_FROM: tl.constexpr = B_LAYOUT if TMA else "pointers"
    if A_FROM == "row":
        a_desc = tl.make_tensor_descriptor(a, [M, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
    if A_FROM == "col":
        a_desc = tl.make_tensor_descriptor(a, [K, M], [stride_ak, 1], [BLOCK_K, BLOCK_M])
    if B_FROM == "row":
        b_desc = tl.make_tensor_descriptor(b, [K, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
    if B_FROM == "col":
        b_desc = tl.make_tensor_descriptor(b, [N, K], [stride_bn, 1], [BLOCK_N, BLOCK_K])
    out_desc = None
    if OUT_LAYOUT == "row" and TMA:
        PIECES: tl.constexpr = 4 if out.dtype.element_ty == tl.float32 else 2
        out_desc = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK_M, BLOCK_N // PIECES])

    tiles_m = (M - 1) // BLOCK_M + 1
    tiles_n = (N - 1) // BLOCK_N + 1
    # All parts take the same number of steps; elements behind K are read as zeros.
    steps = (K - 1) // (BLOCK_K * SPLIT_K) + 1
    for turn in tl.range(
        tl.program_id(0), tiles_m * tiles_n * SPLIT_K, tl.num_programs(0), flatten=SPLIT_K == 1
    ):  # fmt: skip
        tile = turn // SPLIT_K
        first_step = turn % SPLIT_K * steps
        # Within a group the tile's row varies fastest; the last group may have fewer rows.
        group = tile // (GROUP_M * tiles_n)
        within = tile % (GROUP_M * tiles_n)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        tile_m = group * GROUP_M + within % group_rows
        tile_n = within // group_rows
        first_row, first_col = (tile_m * BLOCK_M).to(tl.int32), (tile_n * BLOCK_N).to(tl.int32)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            first_k = (first_step + step) * BLOCK_K
            # Computed inside the loop: values that a flattened loop carries lose their known alignment, and loads their
            # width.
            row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
            col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            k = first_k + tl.arange(0, BLOCK_K).to(tl.int64)
            if A_FROM == "row":
                a_tile = a_desc.load([first_row, first_k])
            elif A_FROM == "col":
                a_tile = a_desc.load([first_k, first_row]).T
            else:
                a_mask = row < M if EVEN_K else (row < M) & (k[None, :] < K)
                a_tile = tl.load(a + row * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0)
            if B_FROM == "row":
                b_tile = b_desc.load([first_k, first_col])
            elif B_FROM == "col":
                b_tile = b_desc.load([first_col, first_k]).T
            else:
                b_mask = col < N if EVEN_K else (k[:, None] < K) & (col < N)
                b_tile = tl.load(b + k[:, None] * stride_bk + col * stride_bn, mask=b_mask, other=0.0)
            total = tl.dot(a_tile, b_tile, total)
        if SPLIT_K == 1:
            _store(total, out, out_desc, M, N, tile_m, tile_n)
        else:
            place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            parts = sums + tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N) + place
            tl.store(parts + turn % SPLIT_K * (BLOCK_M * BLOCK_N), total)
            # For all threads' stores, before one thread takes the ticket. The ticket is release and acquire in one: the
            # holder of a tile's last ticket may read what the others have written, from L2 (.cg).
            tl.debug_barrier()
            ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")
            if ticket == SPLIT_K - 1:
                total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                for part in range(SPLIT_K):
                    total += tl.load(parts + part * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
                _store(total, out, out_desc, M, N, tile_m, tile_n)
                tl.store(tickets + tile, 0)


@triton.jit(do_not_specialize=["pairs"])
def matmul_bf16_v15_dispatch_repack_kernel(
    source, target, rows, cols, pairs, stride_row: tl.int64, stride_col,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    # source: [rows, cols], target: [rows, 2 * pairs], zero behind cols. A thread reads two elements, two bytes at a
    # time, and writes four bytes: each access of a warp then falls into one line. If the pitch's alignment were known,
    # it would write 16 bytes, and read from places 16 bytes apart.
    blocks = (2 * pairs - 1) // BLOCK_COLS + 1
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    values = tl.load(source + row * stride_row + col * stride_col, mask=(row < rows) & (col < cols), other=0.0)
    tl.store(target + row * (2 * pairs) + col, values, mask=(row < rows) & (col < 2 * pairs))


def repacked(matrix: Tensor) -> Tensor:
    """A copy that descriptors can take: column-major if the matrix is contiguous along columns, else row-major."""
    if matrix.stride(0) == 1 and matrix.stride(1) != 1:
        return repacked(matrix.t()).t()
    rows, cols = matrix.shape
    pitch = triton.cdiv(cols, PITCH) * PITCH
    copy = torch.empty((rows, pitch), dtype=matrix.dtype, device=matrix.device)
    block_rows, block_cols = 16, 256
    grid = (triton.cdiv(rows, block_rows) * triton.cdiv(pitch, block_cols),)
    matmul_bf16_v15_dispatch_repack_kernel[grid](
        matrix, copy, rows, cols, pitch // 2, *matrix.stride(),
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=4,
    )  # fmt: skip
    return copy[:, :cols]


@dataclass(frozen=True, slots=True)
class Plan:
    """An entry of the launch cache, for calls that differ in values and in equally aligned addresses alone."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    repack_a: bool
    repack_b: bool
    sums: int  # elements of the workspace; 0 where no tile is split
    arguments: tuple[Any, ...]  # those after tickets


_plans: dict[tuple[Any, ...], Plan] = {}


def matmul_bf16_v15_dispatch(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides, both bf16 or fp16; out: [M, N], row-major, the same or fp32."""
    aligned = a.data_ptr() % 16 == 0, b.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0
    key = a.shape, a.stride(), b.shape, b.stride(), a.dtype, out.dtype, aligned, a.get_device()
    plan = _plans.get(key)
    if plan is None or tuning.is_recording():
        plan = _first(a, b, out)
        if plan is not None:
            if len(_plans) == PLANS:
                _plans.clear()
            _plans[key] = plan
        return
    if plan.repack_a:
        a = repacked(a)
    if plan.repack_b:
        b = repacked(b)
    sums = tickets = None
    if plan.sums:
        sums, tickets = torch.empty(plan.sums, dtype=torch.float32, device=a.device), counter(a.device)
    triton.set_allocator(scratch)
    plan.kernel[plan.grid](a, b, out, sums, tickets, *plan.arguments)


def _first(a: Tensor, b: Tensor, out: Tensor) -> Plan | None:
    """Run a product that is not in the launch cache, and make its plan, unless it is empty, interpreted or captured."""
    (M, K), N = a.shape, b.shape[1]
    if min(M, N, K) == 0:  # a flattened loop takes at least one step, so K = 0 is not for it
        out.zero_()
        return None
    repack_a, repack_b = (has_tma() and layout_of(x) == "pointers" for x in (a, b))
    a, b = repacked(a) if repack_a else a, repacked(b) if repack_b else b
    a_layout, b_layout, out_layout = layout_of(a), layout_of(b), layout_of(out)
    variant = tuning.layouts(a=a_layout, b=b_layout, store=out_layout)
    if out.dtype != a.dtype:
        variant["out"] = "fp32"
    problem = tuning.problem_of(M, N, K, dtype=a.dtype, **variant)
    kernel, config = tuning.choose(matmul_bf16_v15_dispatch_kernel, "matmul_bf16/v15_dispatch", problem, a.device)
    arguments = a, b, out, M, N, K, *a.stride(), *b.stride()
    layouts = {"A_LAYOUT": a_layout, "B_LAYOUT": b_layout, "OUT_LAYOUT": out_layout}
    if not config:
        timed = worth_timing(kernel.configs, {"a": a, "M": M, "N": N, "K": K})
        most = max(sums_of(M, N, each.kwargs) for each in timed)
        _launch(kernel, lambda config: grid_of(M, N, config, a.device), most, arguments, layouts)
        kernel, config = kernel.fn, kernel.best_config.all_kwargs()
    if tiles_of(M, N, config) > COUNTERS:  # possible for the winner of a near problem
        config = config | {"SPLIT_K": 1}
    grid, sums = grid_of(M, N, config, a.device), sums_of(M, N, config)
    compiled = _launch(kernel, grid, sums, arguments, layouts | config)
    # The interpreter compiles nothing; and under capture the configuration is a stopgap, not to be kept.
    if not isinstance(compiled, CompiledKernel) or torch.cuda.is_current_stream_capturing():
        return None
    constants = layouts | config | {"EVEN_K": K % (config["BLOCK_K"] * config["SPLIT_K"]) == 0}
    named = tuple(constants[name] for name in compiled.src.fn.arg_names if name in constants)
    return Plan(compiled, grid, repack_a, repack_b, sums, arguments[3:] + named)


def _launch(kernel: Any, grid: Any, sums: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    a, b, out, *sizes = arguments
    workspace = tickets = None
    if sums:
        workspace, tickets = torch.empty(sums, dtype=torch.float32, device=a.device), counter(a.device)
    triton.set_allocator(scratch)
    return kernel[grid](a, b, out, workspace, tickets, *sizes, **constants)


def grid_of(M: int, N: int, config: dict[str, Any], device: torch.device) -> tuple[int, int, int]:
    """All parts at once if tiles are split; else as many programs as SMs can hold, more of small tiles."""
    if config["SPLIT_K"] > 1:
        return tiles_of(M, N, config) * config["SPLIT_K"], 1, 1
    programs_per_sm = max(1, 2 * 128 * 128 // (config["BLOCK_M"] * config["BLOCK_N"]))
    return min(tiles_of(M, N, config), programs_per_sm * sm_count(device)), 1, 1


def sums_of(M: int, N: int, config: dict[str, Any]) -> int:
    """Elements of the workspace for the partial sums of split tiles."""
    parts = config["SPLIT_K"]
    return tiles_of(M, N, config) * parts * config["BLOCK_M"] * config["BLOCK_N"] if parts > 1 else 0

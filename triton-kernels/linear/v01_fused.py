"""linear v01_fused: matmul_bf16's last step with bias and activation applied before the sums are rounded.

Change:   a tile's sums get their bias and go through the activation in registers, a half or a quarter of the tile at a
          time; where the backward pass will need it, what the activation was applied to is stored as well.
Why:      on its own, bias and activation read and write the whole result once more, and round it in between.
Counter:  dram_bytes of the product alone; instructions rise by bias and activation.
Requires: compute capability 9.0; nothing of sizes and strides.
Twin:     cuda-kernels/linear/v01_fused.cu
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from kernel_twins._triton import tuning
from kernel_twins._triton.device import has_tma, layout_of, scratch
from kernel_twins._triton.matmul_bf16.v15_dispatch import (
    CONFIGS,
    PLANS,
    Plan,
    _halves,
    _store_part,
    grid_of,
    repacked,
    sums_of,
    tiles_of,
    worth_timing,
)
from kernel_twins._triton.workspace import COUNTERS, counter

LARGE_QUARTER = tl.constexpr(4096)  # elements of a quarter of a tile that is stored in eighths

LOG2_E = tl.constexpr(1.4426950408889634)
TANH_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
TANH_CUBIC = tl.constexpr(0.044715)
FARTHEST_TAIL = tl.constexpr(10.0)  # the integral is 2^-76


@triton.jit
def _sigmoid_denominator(x):
    # x / this is x * sigmoid(x): one division for both.
    return 1.0 + tl.exp2(-LOG2_E * x)


@triton.jit
def _twice_tanh_argument(x):
    # The tanh form of gelu is x * sigmoid(2 u).
    return 2.0 * TANH_SCALE * x * (1.0 + TANH_CUBIC * x * x)


@triton.jit
def _normal_density(x):
    # But for 1 / sqrt(2 pi).
    return tl.exp2(-0.5 * LOG2_E * x * x)


@triton.jit
def _normal_tail(t):
    # The normal distribution's integral from -inf to -t, for t from 0 to FARTHEST_TAIL. Its logarithm is smooth, and p
    # the polynomial of degree 6 that minimises the largest relative error of t * 2^p(t): 3e-5 up to 5, 5e-4 up to 6,
    # where t times the integral is 6e-9. tl.erf takes several times the instructions, two of them slow.
    p = t * 2.52133836e-5 - 6.46586114e-4
    p = t * p + 7.40630228e-3
    p = t * p - 5.17569359e-2
    p = t * p - 0.460578256
    p = t * p - 1.15047896
    return tl.exp2(t * p - 1.0000432)


@triton.jit
def _normal_cdf(x):
    # The normal distribution's integral up to x.
    tail = _normal_tail(tl.minimum(tl.abs(x), FARTHEST_TAIL))
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    # Where x is -inf, PyTorch's gelu and silu are NaN, and so are these.
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "gelu":
        # x * cdf(x) = max(x, 0) - |x| * tail(|x|). The maximum so that NaN and -inf give NaN.
        t = tl.minimum(tl.abs(x), FARTHEST_TAIL)
        x = (0.5 * x + 0.5 * tl.abs(x)) - t * _normal_tail(t)
    elif ACTIVATION == "gelu_tanh":
        x = x / _sigmoid_denominator(_twice_tanh_argument(x))
    elif ACTIVATION == "silu":
        x = x / _sigmoid_denominator(x)
    return x


@triton.jit
def _finish_part(
    part, bias, pre, pre_desc, out, out_desc, M, N, first_row, first_col, ACTIVATION: tl.constexpr
):  # fmt: skip
    if bias is not None:
        col = first_col + tl.arange(0, part.shape[1])
        part += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if pre is not None:
        _store_part(part, pre, pre_desc, M, N, first_row, first_col)
    _store_part(_activate(part, ACTIVATION), out, out_desc, M, N, first_row, first_col)


@triton.jit
def _finish_quarter(part, bias, pre, out, M, N, first_row, first_col, ACTIVATION: tl.constexpr):
    HALF: tl.constexpr = part.shape[1] // 2
    if part.shape[0] * part.shape[1] < LARGE_QUARTER:
        _finish_part(part, bias, pre, None, out, None, M, N, first_row, first_col, ACTIVATION)
    else:
        left, right = _halves(part)
        _finish_part(left, bias, pre, None, out, None, M, N, first_row, first_col, ACTIVATION)
        _finish_part(right, bias, pre, None, out, None, M, N, first_row, first_col + HALF, ACTIVATION)


@triton.jit
def _finish(total, bias, pre, pre_desc, out, out_desc, M, N, tile_m, tile_n, ACTIVATION: tl.constexpr):
    # total: [BLOCK_M, BLOCK_N], of out: [M, N]. Through descriptors go halves, through pointers, which take registers,
    # quarters or eighths.
    first_row, first_col = tile_m.to(tl.int64) * total.shape[0], tile_n.to(tl.int64) * total.shape[1]
    HALF: tl.constexpr = total.shape[1] // 2
    QUARTER: tl.constexpr = total.shape[1] // 4
    left, right = _halves(total)
    if out_desc is not None:
        _finish_part(left, bias, pre, pre_desc, out, out_desc, M, N, first_row, first_col, ACTIVATION)
        _finish_part(right, bias, pre, pre_desc, out, out_desc, M, N, first_row, first_col + HALF, ACTIVATION)
    else:
        first, second = _halves(left)
        third, fourth = _halves(right)
        _finish_quarter(first, bias, pre, out, M, N, first_row, first_col, ACTIVATION)
        _finish_quarter(second, bias, pre, out, M, N, first_row, first_col + QUARTER, ACTIVATION)
        _finish_quarter(third, bias, pre, out, M, N, first_row, first_col + HALF, ACTIVATION)
        _finish_quarter(fourth, bias, pre, out, M, N, first_row, first_col + HALF + QUARTER, ACTIVATION)


@triton.autotune(
    CONFIGS,
    key=["M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn", "OUT_LAYOUT"],
    prune_configs_by={"early_config_prune": worth_timing},
    cache_results=True,
    do_bench=tuning.bench,
)
@triton.heuristics({"EVEN_K": lambda args: args["K"] % (args["BLOCK_K"] * args["SPLIT_K"]) == 0})
@triton.jit
def linear_v01_fused_kernel(
    a, b, bias, out, pre, sums, tickets, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    A_LAYOUT: tl.constexpr, B_LAYOUT: tl.constexpr, OUT_LAYOUT: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K] is x and b: [K, N] is weight.T; bias: [N] or None; out: [M, N] row-major, and so is pre, which may be
    # None; for SPLIT_K > 1 sums: [tiles, SPLIT_K, BLOCK_M, BLOCK_N] and tickets: [tiles]. The copy engine counts in 32
    # bits, pointers in 64. What is column-major is described as its transpose.
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
    pre_desc = None
    if OUT_LAYOUT == "row" and TMA:
        out_desc = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK_M, BLOCK_N // 2])
        if pre is not None:
            pre_desc = tl.make_tensor_descriptor(pre, [M, N], [N, 1], [BLOCK_M, BLOCK_N // 2])

    tiles_m = (M - 1) // BLOCK_M + 1
    tiles_n = (N - 1) // BLOCK_N + 1
    # Every part takes as many steps; what lies behind K is read as zeros.
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
            # Computed here, not above: what a flattened loop carries along loses its alignment, and loads their width.
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
            _finish(total, bias, pre, pre_desc, out, out_desc, M, N, tile_m, tile_n, ACTIVATION)
        else:
            place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            parts = sums + tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N) + place
            tl.store(parts + turn % SPLIT_K * (BLOCK_M * BLOCK_N), total)
            # All threads have stored before one takes the ticket, which is release and acquire in one: whoever holds
            # the tile's last ticket may read what the others have written, from L2 (.cg).
            tl.debug_barrier()
            ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")
            if ticket == SPLIT_K - 1:
                total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                for part in range(SPLIT_K):
                    total += tl.load(parts + part * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
                _finish(total, bias, pre, pre_desc, out, out_desc, M, N, tile_m, tile_n, ACTIVATION)
                tl.store(tickets + tile, 0)


_plans: dict[tuple[Any, ...], Plan] = {}


def linear_v01_fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor | tuple[Tensor, Tensor],
    activation: str = "none",
) -> None:
    """out = activation(x @ weight.T + bias); x: [M, K], weight: [N, K], any strides; bias: [N], contiguous, or None.

    All are bf16 or all fp16. ``out``: [M, N], row-major, or a pair of such, of which the second receives what the
    activation was applied to. ``activation`` is "none", "relu", "gelu", "gelu_tanh" or "silu".
    """
    out, pre = out if isinstance(out, tuple) else (out, None)
    aligned = (
        x.data_ptr() % 16 == 0, weight.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0,
        bias.data_ptr() % 16 == 0 if bias is not None else None, pre.data_ptr() % 16 == 0 if pre is not None else None,
    )  # fmt: skip
    key = x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, activation, aligned, x.get_device()
    plan = _plans.get(key)
    if plan is None or tuning.is_recording():
        plan = _first(x, weight, bias, out, pre, activation)
        if plan is not None:
            if len(_plans) == PLANS:
                _plans.clear()
            _plans[key] = plan
        return
    if plan.repack_a:
        x = repacked(x)
    if plan.repack_b:
        weight = repacked(weight)
    sums = tickets = None
    if plan.sums:
        sums, tickets = torch.empty(plan.sums, dtype=torch.float32, device=x.device), counter(x.device)
    triton.set_allocator(scratch)
    plan.kernel[plan.grid](x, weight, bias, out, pre, sums, tickets, *plan.arguments)


def _first(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None, activation: str
) -> Plan | None:
    """Run a product that has no plan, and make one, unless it is empty, interpreted or captured."""
    (M, K), N = x.shape, weight.shape[0]
    if min(M, N) == 0:
        return None
    if K == 0:  # a flattened loop takes at least one step: over zeros
        zeros = x.new_zeros(M, 8), weight.new_zeros(N, 8)
        linear_v01_fused(*zeros, bias, out=out if pre is None else (out, pre), activation=activation)
        return None
    repack_a, repack_b = (has_tma() and layout_of(operand) == "pointers" for operand in (x, weight))
    x, weight = repacked(x) if repack_a else x, repacked(weight) if repack_b else weight
    a, b = x, weight.t()
    out_layout = layout_of(out) if pre is None or layout_of(pre) == "row" else "pointers"
    variant = tuning.layouts(x=x, w=weight, store=out_layout)
    problem = tuning.problem_of(M, N, K, dtype=x.dtype, **variant)
    kernel, config = tuning.choose(linear_v01_fused_kernel, "linear/v01_fused", problem, x.device)
    sizes = M, N, K, *a.stride(), *b.stride()
    layouts = {"A_LAYOUT": layout_of(a), "B_LAYOUT": layout_of(b), "OUT_LAYOUT": out_layout}
    if not config:
        # One search serves all calls: it always runs with gelu and a bias, and without pre.
        searched = a, b, out.new_zeros(N) if bias is None else bias, out, None
        timed = worth_timing(kernel.configs, {"a": a, "M": M, "N": N, "K": K})
        most = max(sums_of(M, N, each.kwargs) for each in timed)
        grid = lambda config: grid_of(M, N, config, a.device)  # noqa: E731
        _launch(kernel, grid, most, searched, sizes, layouts | {"ACTIVATION": "gelu"})
        kernel, config = kernel.fn, kernel.best_config.all_kwargs()
    if tiles_of(M, N, config) > COUNTERS:  # a near problem's winner
        config = config | {"SPLIT_K": 1}
    grid, sums = grid_of(M, N, config, a.device), sums_of(M, N, config)
    constants = layouts | {"ACTIVATION": activation} | config
    compiled = _launch(kernel, grid, sums, (a, b, bias, out, pre), sizes, constants)
    # There is none in the interpreter; and under capture the choice is a makeshift.
    if not isinstance(compiled, CompiledKernel) or torch.cuda.is_current_stream_capturing():
        return None
    constants["EVEN_K"] = K % (config["BLOCK_K"] * config["SPLIT_K"]) == 0
    named = tuple(constants[name] for name in compiled.src.fn.arg_names if name in constants)
    return Plan(compiled, grid, repack_a, repack_b, sums, sizes + named)


def _launch(
    kernel: Any, grid: Any, sums: int, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], constants: Any
) -> Any:
    out = tensors[3]
    workspace = tickets = None
    if sums:
        workspace, tickets = torch.empty(sums, dtype=torch.float32, device=out.device), counter(out.device)
    triton.set_allocator(scratch)
    return kernel[grid](*tensors, workspace, tickets, *sizes, **constants)

"""linear v01_fused: matmul_bf16's last step with bias and activation applied before the sums are rounded.

Change:   in the epilogue, a tile's sums get their bias and go through the activation in registers, a half or a quarter
          of the tile at a time; if the backward pass will need the activation's argument, it is stored as well.
Why:      on its own, bias and activation read and write the whole result once more, and round it in between.
Counter:  dram_bytes of the product alone; instructions rise by bias and activation.
Requires: compute capability 9.0; M, N and K below 2^31; nothing of strides.
Twin:     cuda-kernels/matmul/linear/v01_fused.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.device import layout_of
from kernel_twins._triton.lib.workspace import COUNTERS
from kernel_twins._triton.matmul.matmul_bf16.v15_dispatch import (
    PLANS,
    _halves,
    _store_part,
    grid_of,
    repacked,
    sums_of,
    tiles_of,
)
from kernel_twins._triton.matmul.matmul_bf16.v17_prologue import (
    CONFIGS,
    LARGEST_SIZE,
    Plan,
    blocks_of,
    described,
    launch,
    planned,
    prepare,
    replay,
    stored_as,
    worth_timing,
)

LARGE_QUARTER = tl.constexpr(4096)  # elements of a quarter of a tile that is stored in eighths

LOG2_E = tl.constexpr(1.4426950408889634)
TANH_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
TANH_CUBIC = tl.constexpr(0.044715)
FARTHEST_TAIL = tl.constexpr(15.0)  # the integral is next to nothing


@triton.jit
def _sigmoid_denominator(x):
    # x / this is x * sigmoid(x): one division for both.
    return 1.0 + tl.exp2(-LOG2_E * x)


@triton.jit
def _twice_tanh_argument(x):
    # The tanh form of gelu is x * sigmoid(2 u).
    return 2.0 * TANH_SCALE * x * (1.0 + TANH_CUBIC * x * x)


@triton.jit
def _normal_tail(t):
    # The normal distribution's integral from -inf to -t, for t from 0 to FARTHEST_TAIL. Its logarithm is smooth, and p
    # the polynomial of degree 6 that minimises the largest relative error of t * 2^p(t) up to 5.5: it is 3e-5. Behind
    # that the error grows, of a result below 2e-7. tl.erf takes three times the instructions.
    p = t * 2.52133836e-5 - 6.46586114e-4
    p = t * p + 7.40630228e-3
    p = t * p - 5.17569359e-2
    p = t * p - 0.460578256
    p = t * p - 1.15047896
    return tl.exp2(t * p - 1.0000432)


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
    # total: [BLOCK_M, BLOCK_N], of out: [M, N]. Stores by descriptor take halves; stores by pointers, which need
    # registers, take quarters or eighths.
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
    key=["M", "N", "K", "A_COL", "B_COL", "OUT_DESCRIBED"],
    prune_configs_by={"early_config_prune": worth_timing},
    cache_results=True,
    do_bench=tuning.bench,
)
@triton.heuristics({"ONE_TILE": prepare})
@triton.jit
def linear_v01_fused_kernel(
    a_desc, b_desc, out_desc, pre_desc, bias, out, pre, sums, tickets, M, N, K,
    A_COL: tl.constexpr, B_COL: tl.constexpr, OUT_DESCRIBED: tl.constexpr, EARLY: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    # a: [M, K] is x and b: [K, N] is weight.T, what is column-major described as its transpose; bias: [N] or None; out:
    # [M, N] row-major, and so is pre, which may be None, both without descriptors where the copy engine cannot store
    # one of them; for SPLIT_K > 1 sums: [tiles, SPLIT_K, BLOCK_M, BLOCK_N] and tickets: [tiles].
    if EARLY:
        # Programmatic dependent launch: the next kernel may be set up beside this one, as this one was beside the
        # kernel before it, which must be done before anything that it wrote or reads is touched.
        gdc_launch_dependents()
        gdc_wait()
    tiles_m = (M - 1) // BLOCK_M + 1
    tiles_n = (N - 1) // BLOCK_N + 1
    # All parts take the same number of steps; elements behind K are read as zeros.
    steps = (K - 1) // (BLOCK_K * SPLIT_K) + 1
    # A range of one element is one turn, which the compiler sees: it leaves no loop.
    first = tl.program_id(0)
    turns = first + 1 if ONE_TILE else tiles_m * tiles_n
    for turn in tl.range(first, turns, 1 if ONE_TILE else tl.num_programs(0), flatten=not ONE_TILE):
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
            a_tile = a_desc.load([first_k, first_row]).T if A_COL else a_desc.load([first_row, first_k])
            b_tile = b_desc.load([first_col, first_k]).T if B_COL else b_desc.load([first_k, first_col])
            total = tl.dot(a_tile, b_tile, total)
        if SPLIT_K == 1:
            _finish(total, bias, pre, pre_desc, out, out_desc, M, N, tile_m, tile_n, ACTIVATION)
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

    All are bf16 or all fp16. ``out``: [M, N], row-major, or a pair of such, the second of which
    receives the activation's argument. ``activation`` is "none", "relu", "gelu", "gelu_tanh" or "silu".
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
    replay(plan, (x, weight, out, pre), (bias, out, pre))


def _first(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None, activation: str
) -> Plan | None:
    """Run a product that is not in the launch cache, and make its plan, unless it is empty, interpreted or captured."""
    (M, K), N = x.shape, weight.shape[0]
    if min(M, N) == 0:
        return None
    if K == 0:  # a flattened loop takes at least one step: over zeros
        zeros = x.new_zeros(M, 8), weight.new_zeros(N, 8)
        linear_v01_fused(*zeros, bias, out=out if pre is None else (out, pre), activation=activation)
        return None
    if max(M, N, K) >= LARGEST_SIZE:
        raise ValueError(
            f"x is {M} x {K} and weight {N} x {K}, all sizes must be below {LARGEST_SIZE} for this step: call it on "
            "slices"
        )
    repack_a, repack_b = (layout_of(operand) == "pointers" for operand in (x, weight))
    x, weight = repacked(x) if repack_a else x, repacked(weight) if repack_b else weight
    a, b = x, weight.t()
    out_layout = stored_as(out) if pre is None or stored_as(pre) == "row" else "pointers"
    variant = tuning.layouts(x=x, w=weight, store=out_layout)
    problem = tuning.problem_of(M, N, K, dtype=x.dtype, **variant)
    kernel, config = tuning.choose(linear_v01_fused_kernel, "linear/v01_fused", problem, x.device)
    constants = {
        "A_COL": layout_of(a) == "col", "B_COL": layout_of(b) == "col", "OUT_DESCRIBED": out_layout == "row",
        "EARLY": not triton.knobs.runtime.interpret,  # which never has two kernels under way
    }  # fmt: skip
    sizes = M, N, K
    if not config:
        # One search serves all calls: it always runs with gelu and a bias, and without pre.
        timed = worth_timing(kernel.configs, {"M": M, "N": N, "K": K, "out": out})
        most = max(sums_of(M, N, each.kwargs) for each in timed)
        given = out.new_zeros(N) if bias is None else bias
        searched = *_describe(a, b, out, None, timed[0].kwargs, out_layout), given, out, None
        grid = lambda config: grid_of(M, N, config, a.device)  # noqa: E731
        launch(kernel, grid, searched, most, sizes, constants | {"ACTIVATION": "gelu"})
        kernel, config = kernel.fn, kernel.best_config.all_kwargs()
    if tiles_of(M, N, config) > COUNTERS:  # possible for the winner of a near problem
        config = config | {"SPLIT_K": 1}
    grid, sums = grid_of(M, N, config, a.device), sums_of(M, N, config)  # type: ignore[assignment]
    descriptors = _describe(a, b, out, pre, config, out_layout)
    constants |= {"ACTIVATION": activation} | config  # type: ignore[arg-type]
    compiled = launch(kernel, grid, (*descriptors, bias, out, pre), sums, sizes, constants)
    return planned(compiled, grid, (repack_a, repack_b), descriptors, sums, sizes, constants, a.device)  # type: ignore[arg-type]


def _describe(
    a: Tensor, b: Tensor, out: Tensor, pre: Tensor | None, config: dict[str, Any], out_layout: str
) -> tuple[TensorDescriptor | None, ...]:
    a_block, b_block, out_block = blocks_of(config, out)
    written = (described(each, out_block) if each is not None and out_layout == "row" else None for each in (out, pre))
    return described(a, a_block), described(b, b_block), *written

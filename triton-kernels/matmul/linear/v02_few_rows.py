"""linear v02_few_rows: few rows or columns are a tile's columns, and programs get equal shares of the work.

Change:   a product with few rows of x or few of weight is that of matmul_bf16's v18, whose tiles have 16 columns. Its
          epilogue applies bias and activation to a whole tile; where programs share one, in the program that adds up
          its parts. All other products are v01's.
Why:      a model that generates a token at a time gives a layer few rows. Then memory bounds it by weight alone, and
          v01's tiles leave SMs without work.
Counter:  time at few rows falls; DRAM bytes stay.
Requires: compute capability 9.0; M, N and K below 2^31; nothing of strides.
Twin:     cuda-kernels/matmul/linear/v02_few_rows.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import layout_of, sm_count
from kernel_twins._triton.matmul.linear.v01_fused import _finish_part, linear_v01_fused
from kernel_twins._triton.matmul.matmul_bf16.few_rows import Choice, choice
from kernel_twins._triton.matmul.matmul_bf16.v15_dispatch import repacked
from kernel_twins._triton.matmul.matmul_bf16.v17_prologue import Plan, described, replay, stored_as
from kernel_twins._triton.matmul.matmul_bf16.v18_few_rows import (
    NEIGHBOURS,
    _add_up,
    _meet,
    _place,
    _program_of,
    _share_begin,
    _slot,
    launch_shares,
)


@triton.jit
def _finish(
    part, bias, pre, pre_desc, out, out_desc, M, N, first_wide, ACTIVATION: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    # part: [BLOCK_WIDE, BLOCK_FEW], of out: [M, N] or, if TRANSPOSED, of out.T
    first_wide, first_few = tl.cast(first_wide, tl.int64), tl.cast(0, tl.int64)
    if TRANSPOSED:
        _finish_part(part.T, bias, pre, pre_desc, out, out_desc, M, N, first_few, first_wide, ACTIVATION)
    else:
        _finish_part(part, bias, pre, pre_desc, out, out_desc, M, N, first_wide, first_few, ACTIVATION)


@triton.jit(do_not_specialize=["M", "N", "K"])
def linear_v02_few_rows_kernel(
    a_desc, b_desc, out_desc, pre_desc, bias, out, pre, sums, tickets, M, N, K,
    A_COL: tl.constexpr, B_COL: tl.constexpr, EARLY: tl.constexpr, ACTIVATION: tl.constexpr,
    TRANSPOSED: tl.constexpr, BLOCK_WIDE: tl.constexpr, BLOCK_FEW: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K] is x and b: [K, N] is weight.T, what is column-major described as its transpose; bias: [N] or None; out:
    # [M, N] row-major, and so is pre, which may be None, both without descriptors where the copy engine cannot store
    # one of them; sums: [2 * programs, BLOCK_WIDE, BLOCK_FEW]; tickets: [3 * programs]. The wide operand is b.T if
    # TRANSPOSED, else a; the other one's lines are few.
    if EARLY:
        # Programmatic dependent launch: the next kernel may be set up beside this one, as this one was beside the
        # kernel before it, which must be done before anything that it wrote or reads is touched.
        gdc_launch_dependents()
        gdc_wait()
    tiles = ((N if TRANSPOSED else M) - 1) // BLOCK_WIDE + 1
    steps = (K - 1) // BLOCK_K + 1
    units_of_tile = steps.to(tl.int64)  # 64 bits are for products with the number of programs
    units = units_of_tile * tiles
    begin, end = _share_begin(tl.program_id(0), units), _share_begin(tl.program_id(0) + 1, units)
    # One loop over all tiles of the share, so that the next tile's loads are under way while one is stored. It holds no
    # barrier, which would keep the compiler from pipelining it: shared tiles are completed behind it.
    total = tl.zeros((BLOCK_WIDE, BLOCK_FEW), dtype=tl.float32)
    for unit in tl.range(begin, end):
        tile, step = unit // steps, unit % steps
        first_wide, first_k = tile * BLOCK_WIDE, step * BLOCK_K
        if TRANSPOSED:
            wide_tile = b_desc.load([first_wide, first_k]) if B_COL else b_desc.load([first_k, first_wide]).T
            few_tile = a_desc.load([first_k, 0]) if A_COL else a_desc.load([0, first_k]).T
        else:
            wide_tile = a_desc.load([first_k, first_wide]).T if A_COL else a_desc.load([first_wide, first_k])
            few_tile = b_desc.load([0, first_k]).T if B_COL else b_desc.load([first_k, 0])
        total = tl.dot(wide_tile, few_tile, total)
        if (step == steps - 1) | (unit == end - 1):
            if (step == steps - 1) & (unit - step >= begin):
                _finish(total, bias, pre, pre_desc, out, out_desc, M, N, first_wide, ACTIVATION, TRANSPOSED)
            else:
                first = _program_of(tile * units_of_tile, units)
                slot = _slot(first, tl.program_id(0) - first)
                tl.store(_place(sums, slot, BLOCK_WIDE, BLOCK_FEW), total)
            total = tl.zeros((BLOCK_WIDE, BLOCK_FEW), dtype=tl.float32)
    # Only the first and the last tile of a share can be shared.
    first_tile, last_tile = begin // steps, (end - 1) // steps
    for tile in tl.range(first_tile, last_tile + 1, max(1, last_tile - first_tile)):
        first = _program_of(tile * units_of_tile, units)
        parts = _program_of((tile + 1) * units_of_tile - 1, units) - first + 1
        if parts > 1:  # noqa: SIM102 - Triton evaluates both sides of an and
            if _meet(sums, tickets, first, parts, BLOCK_WIDE, BLOCK_FEW):
                stride = tl.where(parts > NEIGHBOURS, NEIGHBOURS, 1)
                total = _add_up(sums, first, 0, stride, parts, BLOCK_WIDE, BLOCK_FEW)
                first_wide = tile * BLOCK_WIDE
                _finish(total, bias, pre, pre_desc, out, out_desc, M, N, first_wide, ACTIVATION, TRANSPOSED)


_plans: dict[tuple[Any, ...], Plan] = {}


def linear_v02_few_rows(
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
    (M, K), N = x.shape, weight.shape[0]
    chosen = choice(M, N, K, sm_count(x.device))
    if chosen is None:
        linear_v01_fused(x, weight, bias, out=out, activation=activation)
        return
    out, pre = out if isinstance(out, tuple) else (out, None)
    aligned = plans.alignment(x, weight, out, bias, pre)
    key = x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, activation, aligned, x.get_device()
    plan = _plans.get(key)
    if plan is None:
        plan = _first(x, weight, bias, out, pre, activation, chosen)
        if plan is not None:
            plans.keep(_plans, key, plan)
        return
    replay(plan, (x, weight, out, pre), (bias, out, pre))


def _first(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None, activation: str, chosen: Choice
) -> Plan | None:
    """Run a product that is not in the launch cache, and make its plan, unless it is interpreted."""
    repack_a, repack_b = (layout_of(operand) == "pointers" for operand in (x, weight))
    a, b = repacked(x) if repack_a else x, (repacked(weight) if repack_b else weight).t()
    are_described = all(stored_as(each) == "row" for each in (out, pre) if each is not None)
    written = (described(each, chosen.out_block) if each is not None and are_described else None for each in (out, pre))
    descriptors = described(a, chosen.a_block), described(b, chosen.b_block), *written
    sizes = a.shape[0], b.shape[1], a.shape[1]
    constants = chosen.constants | {
        "A_COL": layout_of(a) == "col", "B_COL": layout_of(b) == "col", "ACTIVATION": activation,
    }  # fmt: skip
    return launch_shares(
        linear_v02_few_rows_kernel, chosen, (repack_a, repack_b), descriptors, (bias, out, pre), sizes, constants
    )

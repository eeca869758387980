"""linear's backward pass beside its two products: dz = dout * activation'(saved) and dbias, in one pass.

A program takes rows of a strip of columns and sums its columns of dz in fp32. A second, small launch adds the programs'
sums in a fixed order, so that every run gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.matmul.linear.v01_fused import (
    LOG2_E,
    TANH_CUBIC,
    TANH_SCALE,
    _sigmoid_denominator,
    _twice_tanh_argument,
)
from kernel_twins._triton.matmul.matmul_bf16.v15_dispatch import PLANS

TILE = 4096  # elements that a program has under way: 16 a thread
COLUMNS = 256  # of a tile, as a warp reads 8 neighbours a lane
PROGRAMS_PER_SM = 4
CHUNKS, CHUNK_COLUMNS = 32, 32  # of a tile of the second launch

DENSITY_SCALE = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def _normal_cdf(x, density):
    # The normal distribution's integral up to x, given exp(-x^2 / 2), within 1e-7: Abramowitz and Stegun, "Handbook of
    # Mathematical Functions" (1964), 7.1.26. Where memory is the limit, its division costs nothing; and where gelu's
    # slope is 0, the error of the forward pass's shorter form would be a hundred times as large.
    t = 1.0 / (1.0 + 0.3275911 * SQRT_HALF * tl.abs(x))
    series = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    beyond = 0.5 * t * series * density  # of |x|
    return tl.where(x < 0.0, beyond, 1.0 - beyond)


@triton.jit
def _derivative(x, ACTIVATION: tl.constexpr):
    # In fp32; for relu, x may be the result.
    if ACTIVATION == "relu":
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACTIVATION == "gelu":
        density = tl.exp2(-0.5 * LOG2_E * x * x)
        slope = _normal_cdf(x, density) + DENSITY_SCALE * x * density
    elif ACTIVATION == "gelu_tanh":
        s = 1.0 / _sigmoid_denominator(_twice_tanh_argument(x))
        slope = s + x * s * (1.0 - s) * (2.0 * TANH_SCALE * (1.0 + 3.0 * TANH_CUBIC * x * x))
    else:
        tl.static_assert(ACTIVATION == "silu")
        s = 1.0 / _sigmoid_denominator(x)
        slope = s + x * s * (1.0 - s)
    return slope


@triton.jit(do_not_specialize=["M", "chunk_rows"])
def linear_backward_kernel(
    dout, saved, dz, partials, M, N, chunk_rows,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # dout, saved, dz: [M, N], row-major; partials: [chunks, N].
    strips = (N - 1) // BLOCK_N + 1
    chunk = (tl.program_id(0) // strips).to(tl.int64)
    col = (tl.program_id(0) % strips).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first_row in range(chunk * chunk_rows, min((chunk + 1) * chunk_rows, M), BLOCK_M):
        row = first_row + tl.arange(0, BLOCK_M)[:, None]
        mask = (row < M) & (col < N)
        gradient = tl.load(dout + row * N + col, mask=mask, other=0.0).to(tl.float32)
        slope = _derivative(tl.load(saved + row * N + col, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
        product = gradient * slope
        if ACTIVATION == "relu":  # 0 even for an infinite gradient, where the product would be NaN
            product = tl.where(slope == 0.0, 0.0, product)
        result = product.to(dz.dtype.element_ty)
        tl.store(dz + row * N + col, result, mask=mask)
        sums += result.to(tl.float32)
    tl.store(partials + chunk * N + col, tl.sum(sums, axis=0)[None, :], mask=col < N)


@triton.jit(do_not_specialize=["chunks"])
def linear_backward_bias_kernel(partials, dbias, N, chunks, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr):
    # partials: [chunks, N], dbias: [N].
    col = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.zeros((CHUNKS, BLOCK_N), dtype=tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        sums += tl.load(partials + chunk.to(tl.int64) * N + col, mask=(chunk < chunks) & (col < N), other=0.0)
    tl.store(dbias + col, tl.sum(sums, axis=0)[None, :], mask=col < N)


# The launch cache: Triton's own launcher specialises anew at every call, which takes longer than a small layer's
# kernel.
_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, CompiledKernel]] = {}


def linear_backward(dout: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """dz = dout * activation'(saved), and its sums over all rows.

    dout and saved: [M, N], row-major, both bf16 or fp16. ``saved`` is what the activation was applied to, for "relu"
    that or its result. Not for "none", whose dz is dout.
    """
    M, N = dout.shape
    dz = torch.empty_like(dout)
    if M == 0 or N == 0:
        return dz, dout.new_zeros(N)
    block_n = min(COLUMNS, triton.next_power_of_2(N))
    block_m = (TILE if N % 8 == 0 else TILE // 2) // block_n  # narrow loads take registers for more addresses
    strips = triton.cdiv(N, block_n)
    wanted = max(1, PROGRAMS_PER_SM * sm_count(dout.device) // strips)
    # Whole tiles, so that no two chunks share one.
    chunk_rows = triton.cdiv(triton.cdiv(M, wanted), block_m) * block_m
    chunks = triton.cdiv(M, chunk_rows)
    partials = torch.empty((chunks, N), dtype=torch.float32, device=dout.device)
    dbias = torch.empty(N, dtype=dout.dtype, device=dout.device)
    grid, bias_grid = (strips * chunks, 1, 1), (triton.cdiv(N, CHUNK_COLUMNS), 1, 1)
    arguments = dout, saved, dz, partials, M, N, chunk_rows, activation, block_m, block_n
    bias_arguments = partials, dbias, N, chunks, CHUNKS, CHUNK_COLUMNS
    aligned = dout.data_ptr() % 16 == 0, saved.data_ptr() % 16 == 0
    key = dout.shape, dout.dtype, activation, aligned, dout.get_device()
    kernels = _compiled.get(key)
    if kernels is None:
        kernels = (
            linear_backward_kernel[grid](*arguments, num_warps=8),
            linear_backward_bias_kernel[bias_grid](*bias_arguments, num_warps=4),
        )
        if isinstance(kernels[0], CompiledKernel):  # not the interpreter's
            if len(_compiled) == PLANS:
                _compiled.clear()
            _compiled[key] = kernels
    else:
        kernels[0][grid](*arguments)
        kernels[1][bias_grid](*bias_arguments)
    return dz, dbias

"""The gradients of x, weight and bias through layer_norm, from what the forward pass saved; fp32 inside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel_twins.errors import UnavailableError
from kernel_twins.ops import baselines, row_cases
from kernel_twins.ops.norm import cases, shared
from kernel_twins.spec import Case, Op, Prediction, Step

if TYPE_CHECKING:
    from torch import Tensor

_NORM = shared.LAYER


def _check(
    dout: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dadded: Tensor | None = None,
    *,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """dout, x, dadded: [M, N], contiguous rows at any distance, fp32, bf16 or fp16 alike; mean, rstd: [M], fp32.

    weight: [N]. out: dx, or with a weight dx, dweight and dbias; [M, N] and [N], contiguous.
    """
    _NORM.check_backward(dout, x, mean, rstd, weight, dadded, out)


def _function(
    dout: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dadded: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The call of PyTorch's autograd. It does not read the bias, only whether there is one, so weight stands for it."""
    statistics, has_weight = (mean[:, None], rstd[:, None]), weight is not None
    mask = [True, has_weight, has_weight]
    dx, *others = baselines.aten("native_layer_norm_backward", dout, x, x.shape[1:], *statistics, weight, weight, mask)
    dx = dx.to(x.dtype) if dadded is None else dx.to(x.dtype) + dadded
    return (dx, *(each.to(x.dtype) for each in others)) if has_weight else dx


_torch = baselines.returned(_function)


def _liger(*inputs: Tensor, out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dout, x, mean, rstd, weight, dadded = _NORM.backward_operands(inputs)
    if weight is None:
        raise UnavailableError("liger-kernel has no layer norm without weight and bias")
    if dadded is not None:
        raise UnavailableError("liger-kernel adds no residual before a layer norm")
    ops, _ = baselines.liger("layer_norm", x.shape[1])
    gradients: tuple[Tensor, ...] = ops.layer_norm_backward(dout, x, weight, weight, mean, rstd)
    return gradients


def _quack(*inputs: Tensor, out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dout, x, mean, rstd, weight, dadded = _NORM.backward_operands(inputs)
    if weight is None:
        raise UnavailableError("quack-kernels has no gradient of a layer norm without weight")
    if dadded is not None:
        raise UnavailableError("quack-kernels adds no residual before a layer norm")
    ops = baselines.quack("rmsnorm", dout, x, weight)
    gradients: tuple[Tensor, ...] = ops.layernorm_bwd(x, weight, dout, rstd, mean)
    return gradients


_SQUARE = Case.of(4_096, 4_096, dtype="bf16")

OP = Op(
    name="layer_norm_backward",
    family="norm",
    chapter=10,
    title="LayerNorm, backward",
    summary="`dx = rstd * (g - mean(g) - xhat * mean(g * xhat))`, `g = dout * weight`, over the rows of two matrices, "
    "and `dweight = sum(dout * xhat)` and `dbias = sum(dout)` over their columns.",
    inputs=_NORM.backward_inputs,
    hostile=True,
    outputs=_NORM.backward_outputs,
    reference=_NORM.dx,
    more_references=(_NORM.dweight, _NORM.dbias),
    check=_check,
    test_cases=cases.backward_test_cases(),
    huge_cases=(Case.of(2**21 + 3, 1_025, dtype="bf16"),),
    bench_cases=(*row_cases.BANDWIDTH_CASES, row_cases.FEW_ROWS, _SQUARE),
    headline_cases=row_cases.HEADLINE_CASES,
    size_axis=row_cases.SIZE_AXIS,
    profile_case=row_cases.PROFILE_CASE,
    ceiling="dram_copy",
    # A difference and a product for xhat, one for g, three for the means, four for dx, three for dweight and dbias.
    flops=lambda case: 13 * math.prod(case.shape),
    bytes=_NORM.backward_bytes,
    baselines={"torch": _torch, "compile": baselines.compiled_results(_function), "liger": _liger, "quack": _quack},
    behind={
        "cuda": ("v07_dispatch", "v03_pipelined", "v01_rows_then_columns"),
        "triton": ("v07_dispatch", "v03_pipelined", "v01_rows_then_columns"),
    },
    steps=(
        Step(
            name="v01_rows_then_columns",
            predictions=(
                Prediction("bytes_over_minimum", "==", 1.67, tolerance=0.1, backends=("cuda",)),
                Prediction("bytes_over_minimum", "<=", 2.2, backends=("triton",)),
                Prediction("dram_share", "<=", 80),
            ),
            launches=3,
            helpers=("norm_backward_sum_kernel",),
        ),
        Step(
            name="v02_persistent",
            predictions=(
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.05),
                Prediction("time", "<=", 0.75, relative=True),
                Prediction("dram_share", "<=", 85),
            ),
            accepts=row_cases.fits(16 * 1_024, "registers hold"),
            launches=2,
            helpers=("norm_backward_sum_kernel",),
        ),
        Step(
            name="v03_pipelined",
            predictions=(
                Prediction("time", "<=", 0.95, relative=True),
                Prediction("dram_share", ">=", 82, backends=("cuda",)),
                Prediction("dram_share", ">=", 76, backends=("triton",)),
                Prediction("time", "<=", 17, case=row_cases.FEW_ROWS),
            ),
            accepts=row_cases.fits(16 * 1_024, "registers hold"),
            launches=2,
            helpers=("norm_backward_sum_kernel",),
        ),
        Step(
            name="v04_cluster",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("time", "<=", 650, case=row_cases.LONG),
                Prediction("time", "<=", 700, case=row_cases.LONGEST),
            ),
            arch=">=9.0",
            launches=2,
            no_triton=f"{row_cases.NO_CLUSTERS}; v07_dispatch goes through L2.",
        ),
        Step(
            name="v07_dispatch",
            predictions=(
                Prediction("dram_share", ">=", 86, backends=("cuda",)),
                Prediction("time", "<=", 0.99, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.72, relative=True, case=_SQUARE, backends=("cuda",)),
                Prediction("time", "<=", 0.86, relative=True, case=row_cases.RAGGED, backends=("cuda",)),
                Prediction("time", "<=", 0.85, relative=True, case=row_cases.LONGEST, backends=("cuda",)),
                Prediction("time", "<=", 1.02, relative=True, backends=("triton",)),
                Prediction("time", "<=", 0.6, relative=True, case=row_cases.LONG, backends=("triton",)),
                Prediction("time", "<=", 0.9, relative=True, case=row_cases.RAGGED, backends=("triton",)),
            ),
            arch=">=9.0",
            launches=2,
            helpers=("norm_backward_sum_kernel",),
        ),
    ),
)

"""``y = x * rstd * weight`` over the rows of a matrix, or of x + residual; fp32 inside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel_twins.ops import baselines, draws, row_cases
from kernel_twins.ops.norm import cases, shared
from kernel_twins.spec import Case, Op, Prediction, Step

if TYPE_CHECKING:
    from torch import Tensor

_NORM = shared.RMS


def _check(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: tuple[Tensor, ...],
    eps: float = _NORM.eps,
) -> None:
    """x, residual: [M, N], contiguous rows at any distance, fp32, bf16 or fp16; weight: [N].

    out: y, rstd and, with a residual, the sum; [M, N] as x, [M] in fp32, contiguous.
    """
    _NORM.check(x, weight, None, residual, out)


def _function(
    x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, *, eps: float = _NORM.eps
) -> tuple[Tensor, ...]:
    added = x if residual is None else x + residual
    y, rstd = baselines.aten("_fused_rms_norm", added, added.shape[1:], weight, eps)
    results = y.to(x.dtype), rstd.flatten()
    return results if residual is None else (*results, added)


_torch = baselines.returned(_function)


def _liger(*inputs: Tensor, out: tuple[Tensor, ...], eps: float = _NORM.eps) -> tuple[Tensor, ...]:
    x, weight, _, residual = _NORM.operands(inputs)
    if residual is None:
        ops, _ = baselines.liger("rms_norm", x.shape[1])
        y, _, rstd, *_ = ops.rms_norm_forward(x, weight, eps, 0.0, "llama", None)
        return y, rstd
    ops, _ = baselines.liger("fused_add_rms_norm", x.shape[1])
    y, added, rstd, *_ = ops.fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama")
    return y, rstd, added


def _quack(*inputs: Tensor, out: tuple[Tensor, ...], eps: float = _NORM.eps) -> None:
    x, weight, _, residual = _NORM.operands(inputs)
    y, rstd, *added = out
    norm = baselines.quack("rmsnorm", x, weight, residual)._rmsnorm_fwd
    norm(x, weight, y, None, rstd, None, residual, added[0] if added else None, eps)


_SHORT_RAGGED = row_cases.bandwidth_case(1_027)
_RESIDUAL = row_cases.bandwidth_case(4_096, residual="yes")


def _differs(baseline: str, case: Case) -> str:
    if baseline == "torch" and case.get("values") in ("inf", "infs"):
        return "PyTorch's fused kernel makes all of a row NaN, its formula what the infinity meets"
    return shared.sum_differs(baseline, case)


OP = Op(
    name="rms_norm",
    family="norm",
    chapter=11,
    title="RMSNorm",
    summary="`y = x * rstd * weight` over the rows of a matrix, `rstd = 1 / sqrt(mean(x^2) + eps)`: a LayerNorm "
    "without the mean, and a ladder of the definition and of what LayerNorm's has found.",
    inputs=_NORM.inputs,
    hostile=True,
    settled=shared.settled,
    draw=draws.rows_of("x", cases.DRAWN_OPTIONS),
    outputs=_NORM.outputs,
    reference=_NORM.y,
    more_references=(_NORM.rstd, _NORM.added),
    check=_check,
    options=_NORM.options,
    test_cases=cases.test_cases(_NORM),
    huge_cases=(Case.of(2**21 + 3, 1_025, dtype="bf16"),),
    bench_cases=(
        *row_cases.BANDWIDTH_CASES,
        _SHORT_RAGGED,
        _RESIDUAL,
        row_cases.FEW_ROWS,
    ),
    headline_cases=row_cases.HEADLINE_CASES,
    size_axis=row_cases.SIZE_AXIS,
    profile_case=row_cases.PROFILE_CASE,
    ceiling="dram_copy",
    flops=lambda case: 4 * math.prod(case.shape),  # a square's sum, two products
    bytes=_NORM.bytes,
    differs=_differs,
    baselines={"torch": _torch, "compile": baselines.compiled_results(_function), "liger": _liger, "quack": _quack},
    behind={
        "cuda": ("v07_dispatch", "v01_two_passes"),
        "triton": ("v07_dispatch", "v04_rows_per_block", "v01_two_passes"),
    },
    steps=(
        Step(
            name="v01_two_passes",
            predictions=(
                Prediction("dram_share", "<=", 75),
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.1, backends=("cuda",)),
                Prediction("bytes_over_minimum", "<=", 1.2, backends=("triton",)),
            ),
        ),
        Step(
            name="v02_cluster",
            predictions=(
                Prediction("time", "<=", 0.85, relative=True),
                Prediction("dram_share", ">=", 88),
                Prediction("time", "<=", 0.35, relative=True, case=row_cases.SHORTEST),
                Prediction("time", "<=", 365, case=row_cases.LONG),
                Prediction("time", "<=", 370, case=row_cases.LONGEST),
            ),
            arch=">=9.0",
            no_triton=f"{row_cases.NO_CLUSTERS}; v07_dispatch goes through L2.",
        ),
        Step(
            name="v04_rows_per_block",
            predictions=(
                Prediction("time", "<=", 0.75, relative=True),
                Prediction("dram_share", ">=", 85),
                Prediction("time", "<=", 0.5, relative=True, case=row_cases.SHORTEST),
                Prediction("time", "<=", 0.85, relative=True, case=row_cases.bandwidth_case(16_384)),
            ),
            accepts=row_cases.fits(64 * 1_024, "registers hold"),
            no_cuda="CUDA's v02_cluster has such kernels, and others for rows that a block does not hold.",
            standalone=True,
        ),
        Step(
            name="v05_cluster_registers",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("time", "<=", 366, case=row_cases.LONG_RAGGED),
                Prediction("time", "<=", 363, case=row_cases.LONG),
                Prediction("time", "<=", 363, case=row_cases.LONGEST),
                Prediction("time", "<=", 361),
                Prediction("time", "<=", 355.5, case=row_cases.bandwidth_case(12_288)),
                Prediction("time", "<=", 0.95, relative=True, case=row_cases.LONG),
                Prediction("time", "<=", 0.75, relative=True, case=row_cases.LONG_RAGGED),
                Prediction("time", "<=", 720, case=_RESIDUAL),
            ),
            arch=">=9.0",
            no_triton=f"{row_cases.NO_CLUSTERS}; v07_dispatch's programs hold their parts in registers, too, and "
            "exchange through L2.",
        ),
        Step(
            name="v07_dispatch",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.01, backends=("cuda",)),
                Prediction("time", "<=", 0.995, relative=True, case=row_cases.SHORT, backends=("cuda",)),
                Prediction("time", "<=", 0.98, relative=True, case=row_cases.FEW_ROWS, backends=("cuda",)),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.01, case=row_cases.LONG, backends=("cuda",)),
                Prediction("time", "<=", 1.01, relative=True, backends=("triton",)),
                Prediction("time", "<=", 0.75, relative=True, case=row_cases.LONG, backends=("triton",)),
                Prediction("time", "<=", 420, case=_SHORT_RAGGED, backends=("triton",)),
            ),
            arch=">=9.0",
        ),
    ),
)

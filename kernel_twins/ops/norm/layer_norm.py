"""``y = (x - mean) * rstd * weight + bias`` over the rows of a matrix, or of x + residual; fp32 inside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel_twins.errors import UnavailableError
from kernel_twins.ops import baselines, draws, row_cases
from kernel_twins.ops.norm import cases, shared
from kernel_twins.spec import Case, Op, Prediction, Step

if TYPE_CHECKING:
    from torch import Tensor

_NORM = shared.LAYER


def _check(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: tuple[Tensor, ...],
    eps: float = _NORM.eps,
) -> None:
    """x, residual: [M, N], contiguous rows at any distance, fp32, bf16 or fp16; weight, bias: [N].

    out: y, mean, rstd and, with a residual, the sum; [M, N] as x, [M] in fp32, contiguous.
    """
    _NORM.check(x, weight, bias, residual, out)


def _function(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = _NORM.eps,
) -> tuple[Tensor, ...]:
    added = x if residual is None else x + residual
    y, mean, rstd = baselines.aten("native_layer_norm", added, added.shape[1:], weight, bias, eps)
    results = y.to(x.dtype), mean.flatten(), rstd.flatten()
    return results if residual is None else (*results, added)


_torch = baselines.returned(_function)


def _liger(*inputs: Tensor, out: tuple[Tensor, ...], eps: float = _NORM.eps) -> tuple[Tensor, ...]:
    x, weight, bias, residual = _NORM.operands(inputs)
    if weight is None or bias is None:
        raise UnavailableError("liger-kernel has no layer norm without weight and bias")
    if residual is not None:
        raise UnavailableError("liger-kernel adds no residual before a layer norm")
    ops, _ = baselines.liger("layer_norm", x.shape[1])
    y, _, mean, rstd, *_ = ops.layer_norm_forward(x, weight, bias, eps)
    return y, mean, rstd


def _quack(*inputs: Tensor, out: tuple[Tensor, ...], eps: float = _NORM.eps) -> None:
    """quack's kernel; its layer norm takes weights of fp32 only, and no residual."""
    x, weight, bias, residual = _NORM.operands(inputs)
    y, mean, rstd, *added = out
    norm = baselines.quack("rmsnorm", x, weight, bias, residual)._rmsnorm_fwd
    norm(x, weight, y, bias, rstd, mean, residual, added[0] if added else None, eps, True)


_FOUR_BLOCKS = row_cases.bandwidth_case(16_384)  # of a cluster with one row
_SHORT_RAGGED = row_cases.bandwidth_case(1_027)
_RESIDUAL = row_cases.bandwidth_case(4_096, residual="yes")

OP = Op(
    name="layer_norm",
    family="norm",
    chapter=9,
    title="LayerNorm",
    summary="`y = (x - mean) * rstd * weight + bias` over the rows of a matrix, `rstd = 1 / sqrt(variance + eps)`: the "
    "second number of a row needs the first one, and a sum of squares would cancel.",
    inputs=_NORM.inputs,
    hostile=True,
    settled=shared.settled,
    draw=draws.rows_of("x", cases.DRAWN_OPTIONS),
    outputs=_NORM.outputs,
    reference=_NORM.y,
    more_references=(_NORM.mean, _NORM.rstd, _NORM.added),
    check=_check,
    options=_NORM.options,
    test_cases=cases.test_cases(_NORM),
    huge_cases=(Case.of(2**21 + 3, 1_025, dtype="bf16"), Case.of(2_049, 2**20, dtype="bf16")),
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
    flops=lambda case: 7 * math.prod(case.shape),  # a sum, a difference, a square's sum, two products, a sum
    bytes=_NORM.bytes,
    differs=shared.sum_differs,
    baselines={"torch": _torch, "compile": baselines.compiled_results(_function), "liger": _liger, "quack": _quack},
    behind={
        "cuda": ("v12_dispatch", "v04_rows_per_block", "v02_welford"),
        "triton": ("v12_dispatch", "v04_rows_per_block", "v02_welford"),
    },
    steps=(
        Step(
            name="v01_three_passes",
            predictions=(
                Prediction("dram_share", "<=", 65),
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.1, backends=("cuda",)),
                Prediction("bytes_over_minimum", "<=", 1.25, backends=("triton",)),
            ),
        ),
        Step(
            name="v02_welford",
            predictions=(
                Prediction("load_requests", "==", 0.8, relative=True, tolerance=0.05),  # weight's and bias's remain
                Prediction("instructions", ">=", 1.2, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.95, relative=True, backends=("triton",)),
            ),
        ),
        Step(
            name="v03_registers",
            predictions=(
                Prediction("time", "<=", 0.8, relative=True),
                Prediction("dram_share", ">=", 60, backends=("cuda",)),
                Prediction("dram_share", ">=", 85, backends=("triton",)),
            ),
            accepts=row_cases.at_most(16_384, "registers hold"),
        ),
        Step(
            name="v04_rows_per_block",
            predictions=(
                Prediction("instructions", "<=", 0.6, relative=True, backends=("cuda",)),
                Prediction("dram_share", ">=", 86),
                Prediction("time", "<=", 0.35, relative=True, backends=("cuda",), case=row_cases.SHORTEST),
                Prediction("time", "<=", 0.7, relative=True, backends=("triton",), case=row_cases.SHORTEST),
            ),
            accepts=row_cases.fits(64 * 1_024, "registers hold"),
            standalone=True,
        ),
        Step(
            name="v05_cluster",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("time", "<=", 365, case=row_cases.LONG),
                Prediction("time", "<=", 370, case=row_cases.LONGEST),
            ),
            arch=">=9.0",
            no_triton=f"{row_cases.NO_CLUSTERS}; v12_dispatch goes through L2.",
            profile_case={"cuda": None},
        ),
        Step(
            name="v08_cluster_registers",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("time", "<=", 376, case=row_cases.LONG_RAGGED),
                Prediction("time", "<=", 366, case=row_cases.RAGGED),
                Prediction("time", "<=", 362, case=row_cases.LONG),
                Prediction("time", "<=", 362),
                Prediction("time", "<=", 364, case=row_cases.LONGEST),
                Prediction("time", "<=", 0.9, relative=True, case=row_cases.LONG),
                Prediction("time", "<=", 0.7, relative=True, case=row_cases.LONG_RAGGED),
                Prediction("time", "<=", 720, case=_RESIDUAL),
            ),
            arch=">=9.0",
            no_triton=f"{row_cases.NO_CLUSTERS}; v12_dispatch's programs hold their parts in registers, too, and "
            "exchange through L2.",
            replaces="v04_rows_per_block",
        ),
        Step(
            name="v12_dispatch",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.01, backends=("cuda",)),
                Prediction("time", "<=", 0.8, relative=True, case=_SHORT_RAGGED, backends=("cuda",)),
                Prediction("time", "<=", 0.99, relative=True, case=row_cases.SHORT, backends=("cuda",)),
                Prediction("time", "<=", 0.95, relative=True, case=row_cases.FEW_ROWS, backends=("cuda",)),
                Prediction("time", "<=", 1.0, relative=True, case=_FOUR_BLOCKS, backends=("cuda",)),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.01, case=row_cases.LONG, backends=("cuda",)),
                Prediction("time", "<=", 0.98, relative=True, backends=("triton",)),
                Prediction("time", "<=", 0.7, relative=True, case=row_cases.LONG, backends=("triton",)),
                Prediction("time", "<=", 0.75, relative=True, case=row_cases.RAGGED, backends=("triton",)),
                Prediction("time", "<=", 420, case=_SHORT_RAGGED, backends=("triton",)),
            ),
            arch=">=9.0",
        ),
    ),
)

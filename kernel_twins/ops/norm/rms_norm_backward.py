"""The gradients of x and weight through rms_norm, from what the forward pass saved; fp32 inside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel_twins.ops import baselines, row_cases
from kernel_twins.ops.norm import cases, shared
from kernel_twins.spec import Case, Op, Prediction, Step

if TYPE_CHECKING:
    from torch import Tensor

_NORM = shared.RMS


def _check(
    dout: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dadded: Tensor | None = None,
    *,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """dout, x, dadded: [M, N], contiguous rows at any distance, fp32, bf16 or fp16 alike; rstd: [M], fp32.

    weight: [N]. out: dx, or with a weight dx and dweight; [M, N] and [N], contiguous.
    """
    _NORM.check_backward(dout, x, None, rstd, weight, dadded, out)


def _function(
    dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None = None, dadded: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    """The call of PyTorch's autograd."""
    mask = [True, weight is not None]
    dx, dweight = baselines.aten("_fused_rms_norm_backward", dout, x, x.shape[1:], rstd[:, None], weight, mask)
    dx = dx.to(x.dtype) if dadded is None else dx.to(x.dtype) + dadded
    return dx if weight is None else (dx, dweight.to(x.dtype))


_torch = baselines.returned(_function)


def _liger(*inputs: Tensor, out: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Liger's kernels with Liger's own settings; its function would clear dx first, or overwrite dout with it."""
    import torch

    dout, x, _, rstd, weight, dadded = _NORM.backward_operands(inputs)
    if dadded is not None:
        ops, settings = baselines.liger("fused_add_rms_norm", x.shape[1])
        stages = 2
        dx, _, dweight = ops.fused_add_rms_norm_backward(
            dout, dadded, x, weight, rstd, 0.0, "llama", *settings.values(), stages, False
        )
        return dx, dweight

    ops, settings = baselines.liger("rms_norm", x.shape[1])
    dx, (m, n) = torch.empty_like(dout, memory_format=torch.contiguous_format), x.shape
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    partial = None if weight is None else torch.empty(programs, n, dtype=torch.float32, device=x.device)
    of_weight = (weight, 0 if weight is None else 1, rstd, 1, partial, 0 if weight is None else n)
    dtype = ops.torch_to_triton_dtype[x.dtype]
    arguments = (dout, dout.stride(0), dx, n, x, x.stride(0), dtype, *of_weight, m, n, 0.0)
    affine = {"elementwise_affine": weight is not None, "COMPUTE_DW": weight is not None}
    settings = {**settings, **affine, "casting_mode": ops._str_to_casting_mode["llama"]}
    if settings["BLOCK_SIZE"] > 256 or m < 4_096 * 8:
        rows_per_program = -(-m // programs)
        ops._rms_norm_backward_kernel[(programs,)](*arguments, rows_per_program, **settings)
    else:
        ops._block_rms_norm_backward_kernel[(programs,)](*arguments, BLOCK_ROW=16, **settings)
    return dx if partial is None else (dx, partial.sum(dim=0).to(dout.dtype))


def _quack(*inputs: Tensor, out: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    dout, x, _, rstd, weight, dadded = _NORM.backward_operands(inputs)
    ops = baselines.quack("rmsnorm", dout, x, weight, dadded)
    dx, dweight, *_ = ops.rmsnorm_bwd(x, weight, dout, rstd, dresidual_out=dadded)
    return dx if weight is None else (dx, dweight)


# The cases at which Liger's intermediate roundings do not average out.
_LIGER_ROUNDS = (
    "1500x1024-bf16-values.outliers",
    "1500x1024-fp16-values.outliers",
    "19x1027-fp16-dout.expanded",
    "19x8192-bf16-dout.expanded",
    "3x2-fp16",
    "3x50257-fp16",
    "3x65536-fp16",
    "5x12288-bf16",
    "5x12288-fp16",
    "5x16387-bf16",
    "5x16387-fp16",
    "67x256-bf16",
    "9x65536-bf16-offset.1",
    "9x65536-fp16-offset.1",
)


def _differs(baseline: str, case: Case) -> str:
    rounds = baseline == "liger" and case.slug in _LIGER_ROUNDS
    return "Liger rounds to half precision what it sums: x * rstd and its product with dout" if rounds else ""


OP = Op(
    name="rms_norm_backward",
    family="norm",
    chapter=12,
    title="RMSNorm, backward",
    summary="`dx = rstd * (g - xhat * mean(g * xhat))`, `g = dout * weight`, over the rows of two matrices, and "
    "`dweight = sum(dout * xhat)` over their columns.",
    inputs=_NORM.backward_inputs,
    hostile=True,
    outputs=_NORM.backward_outputs,
    reference=_NORM.dx,
    more_references=(_NORM.dweight,),
    check=_check,
    test_cases=cases.backward_test_cases(),
    huge_cases=(Case.of(2**21 + 3, 1_025, dtype="bf16"),),
    bench_cases=(
        *row_cases.BANDWIDTH_CASES,
        row_cases.FEW_ROWS,
        Case.of(4_096, 4_096, dtype="bf16"),
    ),
    headline_cases=row_cases.HEADLINE_CASES,
    size_axis=row_cases.SIZE_AXIS,
    profile_case=row_cases.PROFILE_CASE,
    ceiling="dram_copy",
    # A product each for xhat and g, two for the mean, three for dx, two for dweight.
    flops=lambda case: 9 * math.prod(case.shape),
    bytes=_NORM.backward_bytes,
    differs=_differs,
    baselines={"torch": _torch, "compile": baselines.compiled_results(_function), "liger": _liger, "quack": _quack},
    behind={"cuda": ("v05_dispatch", "v01_rows_then_columns"), "triton": ("v05_dispatch", "v01_rows_then_columns")},
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
            name="v02_cluster",
            predictions=(
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.05),
                Prediction("dram_share", ">=", 84),
                Prediction("time", "<=", 620, case=row_cases.LONG),
                Prediction("time", "<=", 680, case=row_cases.LONGEST),
            ),
            arch=">=9.0",
            launches=2,
            no_triton=f"{row_cases.NO_CLUSTERS}; v05_dispatch goes through L2.",
        ),
        Step(
            name="v05_dispatch",
            predictions=(
                Prediction("dram_share", ">=", 86, backends=("cuda",)),
                Prediction("time", "<=", 0.995, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.89, relative=True, case=row_cases.RAGGED, backends=("cuda",)),
                Prediction("time", "<=", 0.9, relative=True, case=row_cases.LONG, backends=("cuda",)),
                Prediction("time", "<=", 0.87, relative=True, case=row_cases.LONGEST, backends=("cuda",)),
                Prediction("time", "<=", 0.55, relative=True, backends=("triton",)),
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.05, backends=("triton",)),
                Prediction("time", "<=", 0.6, relative=True, case=row_cases.LONG, backends=("triton",)),
            ),
            arch=">=9.0",
            launches=2,
            helpers=("norm_backward_sum_kernel",),
        ),
    ),
)

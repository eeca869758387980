"""``dx`` of softmax, or of its logarithm, from dout and y, the result of the forward pass; fp32 inside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kernel_twins.errors import UnavailableError
from kernel_twins.ops import baselines, row_cases
from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor


def _inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """dout, with the case's layout and values, and y as the forward pass returns it: contiguous.

    Where hostile, dout grows with x, so that the sum over a row is as large as its terms.
    """
    import torch

    dout = row_cases.matrix(case, generator, case.get("dout"))
    x = row_cases.lifted(row_cases.matrix(Case.of(*case.shape, dtype=case.dtype), generator), case)
    if case.get("values") == "hostile":
        dout += x
    return dout, (torch.log_softmax if case.get("log") == "yes" else torch.softmax)(x, dim=1)


def _options(case: Case) -> dict[str, Any]:
    return {"log": case.get("log") == "yes"}


def _reference(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    dout, y = (tensor[part].double() for tensor in inputs)
    products = dout if case.get("log") == "yes" else dout * y
    sums = products.sum(dim=1, keepdim=True)
    of_sums = products.abs().sum(dim=1, keepdim=True) + row_cases.row_chain(case.shape[1]) * sums.abs()
    if case.get("log") == "yes":
        p = y.exp()
        return dout - p * sums, dout.abs() + p * (1 + y.abs()) * of_sums
    return y * (dout - sums), y * (dout.abs() + of_sums)


def _check(dout: Tensor, y: Tensor, *, out: Tensor, log: bool = False) -> None:
    """dout, y: [M, N], contiguous rows at any distance, fp32, bf16 or fp16 alike; out: [M, N], contiguous."""
    from kernel_twins.ops import row_checks

    row_checks.require_rows("dout", dout)
    row_checks.require_rows("y", y)
    row_checks.require_matrix("y", y, "dout", dout)
    row_checks.require_result(out, "dout", dout)
    row_checks.require_all_apart(out, {"dout": dout, "y": y})


def _torch(dout: Tensor, y: Tensor, *, out: Tensor, log: bool = False) -> None:
    import torch

    if log:
        torch._log_softmax_backward_data(dout, y, 1, dout.dtype, out=out)
    else:
        torch._softmax_backward_data(dout, y, 1, dout.dtype, grad_input=out)


def _function(dout: Tensor, y: Tensor, *, log: bool = False) -> Tensor:
    """torch.compile of PyTorch's gradient."""
    import torch

    if log:
        return torch._log_softmax_backward_data(dout, y, 1, dout.dtype)
    return torch._softmax_backward_data(dout, y, 1, dout.dtype)


def _liger(dout: Tensor, y: Tensor, *, out: Tensor, log: bool = False) -> None:
    """Liger's kernel with Liger's own settings; its function would allocate the result."""
    if log:
        raise UnavailableError("liger-kernel has no log_softmax")
    ops, settings = baselines.liger("softmax", dout.shape[1])
    ops._softmax_single_block_backward_kernel[(dout.shape[0],)](
        dout, dout.stride(0), y, y.stride(0), out, out.stride(0), dout.shape[1], **settings
    )


def _quack(dout: Tensor, y: Tensor, *, out: Tensor, log: bool = False) -> None:
    if log:
        raise UnavailableError("quack-kernels has no log_softmax")
    baselines.quack("softmax", dout, y)._softmax_backward(dout, y, out)


_LOG = {"log": "yes"}


# The cases at which Liger's intermediate roundings do not average out.
_LIGER_ROUNDS = ("300x7-bf16", "300x7-fp16", "3x2-bf16")


def _differs(baseline: str, case: Case) -> str:
    rounds = baseline == "liger" and case.slug in _LIGER_ROUNDS
    return "Liger rounds to half precision what it sums: dout * y" if rounds else ""


OP = Op(
    name="softmax_backward",
    family="softmax",
    chapter=8,
    title="Softmax, backward",
    summary="`dx = y * (dout - sum(dout * y))` over the rows of two matrices, or `dout - exp(y) * sum(dout)` for the "
    "logarithm: one number of a row, from twice as much to read.",
    inputs=_inputs,
    hostile=True,
    outputs=lambda case: (Output(case.shape, case.dtype),),
    reference=_reference,
    check=_check,
    options=_options,
    # The longest rows that fit the shared memory of one block, and rows of a pack or a line more.
    test_cases=row_cases.test_cases(
        "dout",
        *row_cases.masked_cases(_LOG),
        *row_cases.option_cases(_LOG),
        *((3, n, {}) for n in (26_597, 26_624, 53_187, 53_245, 53_248)),
    ),
    huge_cases=(Case.of(2**21 + 3, 1_025, dtype="bf16"), *row_cases.MANY_ROWS),
    bench_cases=(
        *row_cases.BANDWIDTH_CASES,
        row_cases.bandwidth_case(32_768, log="yes"),
        row_cases.FEW_ROWS,
    ),
    headline_cases=row_cases.HEADLINE_CASES,
    size_axis=row_cases.SIZE_AXIS,
    profile_case=row_cases.PROFILE_CASE,
    ceiling="dram_copy",
    flops=lambda case: 4 * math.prod(case.shape),  # product, sum, difference, product
    bytes=lambda case: 3 * math.prod(case.shape) * ITEMSIZE[case.dtype],
    differs=_differs,
    baselines={"torch": _torch, "compile": baselines.compiled(_function), "liger": _liger, "quack": _quack},
    behind={
        "cuda": ("v07_dispatch", "v03_rows_per_block", "v01_two_passes"),
        "triton": ("v07_dispatch", "v05_cooperative"),
    },
    steps=(
        Step(
            name="v01_two_passes",
            predictions=(
                Prediction("dram_share", "<=", 75),
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.1),
            ),
        ),
        Step(
            name="v02_registers",
            predictions=(
                Prediction("time", "<=", 0.85, relative=True),
                Prediction("dram_share", ">=", 75, backends=("cuda",)),
                Prediction("dram_share", ">=", 88, backends=("triton",)),
            ),
            accepts=row_cases.at_most(8_192, "registers hold"),
        ),
        Step(
            name="v03_rows_per_block",
            predictions=(
                Prediction("dram_share", ">=", 90),
                Prediction("instructions", "<=", 0.7, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.6, relative=True, case=row_cases.SHORTEST),
            ),
            accepts=row_cases.fits(32 * 1_024, "registers hold"),
        ),
        Step(
            name="v04_cluster",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("l2_bytes", "==", 1_611, tolerance=0.02, case=row_cases.LONGEST),
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.03, case=row_cases.LONGEST),
                Prediction("dram_share", "==", 85, tolerance=0.04, case=row_cases.LONGEST),
                Prediction("occupancy", "==", 25, tolerance=0.05, case=row_cases.LONGEST),
            ),
            arch=">=9.0",
            no_triton=f"{row_cases.NO_CLUSTERS}; v05_cooperative goes through L2.",
            profile_case={"cuda": row_cases.LONGEST},
        ),
        Step(
            name="v05_cooperative",
            predictions=(Prediction("time", "==", 1.0, relative=True, tolerance=0.03),),
            no_cuda="CUDA's v04_cluster does the same within a cluster, without going through L2.",
        ),
        Step(
            name="v07_dispatch",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.01),
                Prediction("time", "<=", 0.99, relative=True, case=row_cases.LONG_RAGGED, backends=("cuda",)),
                Prediction("time", "<=", 0.97, relative=True, case=row_cases.LONGEST, backends=("cuda",)),
            ),
            arch=">=9.0",
            replaces="v03_rows_per_block",
        ),
    ),
)

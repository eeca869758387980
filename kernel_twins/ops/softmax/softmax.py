"""``out = softmax(x)`` over the rows of a matrix, or its logarithm; fp32 inside, out in x's dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kernel_twins.errors import UnavailableError
from kernel_twins.ops import baselines, draws, row_cases
from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor


def _inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    return (row_cases.lifted(row_cases.matrix(case, generator, case.get("x")), case),)


def _options(case: Case) -> dict[str, Any]:
    return {"log": case.get("log") == "yes"}


def _reference(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    """The relative error of exp is the rounding error of its argument, so the argument counts among the terms.

    The sum of exponentials counts, too; its terms are all positive.
    """
    import torch

    x = inputs[0][part].double()
    log_y = torch.log_softmax(x, dim=1)
    distance = (x.amax(dim=1, keepdim=True) - x).nan_to_num(0.0, 0.0, 0.0) if x.shape[1] else x
    of_sum = 1 + row_cases.row_chain(case.shape[1])
    if case.get("log") == "yes":
        return log_y, of_sum + distance + log_y.abs()
    y = log_y.exp()
    return y, y * (of_sum + distance)


def _check(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    """x: [M, N], contiguous rows at any distance, fp32, bf16 or fp16; out: [M, N], contiguous, of x's dtype."""
    from kernel_twins.ops import row_checks

    row_checks.require_rows("x", x)
    row_checks.require_result(out, "x", x)
    row_checks.require_all_apart(out, {"x": x})


def _torch(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    import torch

    (torch.log_softmax if log else torch.softmax)(x, dim=1, out=out)


def _function(x: Tensor, *, log: bool = False) -> Tensor:
    import torch

    return torch.log_softmax(x, dim=1) if log else torch.softmax(x, dim=1)


def _liger(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    """Liger's kernel with Liger's own settings; its function would allocate the result."""
    if log:
        raise UnavailableError("liger-kernel has no log_softmax")
    ops, settings = baselines.liger("softmax", x.shape[1])
    ops._softmax_single_block_forward_kernel[(x.shape[0],)](out, out.stride(0), x, x.stride(0), x.shape[1], **settings)


def _quack(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    if log:
        raise UnavailableError("quack-kernels has no log_softmax")
    baselines.quack("softmax", x)._softmax_fwd(x, out)


_LOG = {"log": "yes"}
_SHORT_RAGGED = row_cases.bandwidth_case(515)
# Several rows a warp, a pack a lane or two elements a lane.
_SHORTEST_ROWS: tuple[row_cases.Sized, ...] = (
    *((67, n, {}) for n in (8, 24, 72, 128)),
    (67, 64, _LOG),
    (19, 72, {"x": "spaced"}),
    (9, 64, {"offset": "1"}),
    *((9, 64, {"values": values}) for values in ("inf", "infs", "nan")),
)


OP = Op(
    name="softmax",
    family="softmax",
    chapter=7,
    title="Softmax",
    summary="`out = exp(x - max) / sum(exp(x - max))` over the rows of a matrix: two numbers of a whole row stand "
    "between its elements and the result.",
    inputs=_inputs,
    hostile=True,
    draw=draws.rows_of("x", ({}, {"log": "yes"})),
    outputs=lambda case: (Output(case.shape, case.dtype),),
    reference=_reference,
    check=_check,
    options=_options,
    test_cases=row_cases.test_cases(
        "x",
        *row_cases.masked_cases(_LOG),
        *row_cases.option_cases(_LOG),
        *((9, n, _LOG) for n in (515, 1_024, 3_001, 4_096)),
        *_SHORTEST_ROWS,
        *row_cases.short_cases("x"),
        *row_cases.long_cases("x"),
        (3, 300_003, _LOG),
        *((3, 300_000, {"values": values}) for values in ("infs", "nan")),
    ),
    huge_cases=(
        Case.of(2**21 + 3, 1_025, dtype="bf16"),
        Case.of(2_049, 2**20, dtype="bf16"),
        *row_cases.MANY_ROWS,
    ),
    bench_cases=(
        *row_cases.BANDWIDTH_CASES,
        _SHORT_RAGGED,
        row_cases.bandwidth_case(32_768, log="yes"),
        row_cases.FEW_ROWS,
    ),
    headline_cases=row_cases.HEADLINE_CASES,
    size_axis=row_cases.SIZE_AXIS,
    profile_case=row_cases.PROFILE_CASE,
    ceiling="dram_copy",
    flops=lambda case: 5 * math.prod(case.shape),  # maximum, difference, exponential, sum, product
    bytes=lambda case: 2 * math.prod(case.shape) * ITEMSIZE[case.dtype],
    differs=row_cases.sum_of_exponentials_differs,
    baselines={"torch": _torch, "compile": baselines.compiled(_function), "liger": _liger, "quack": _quack},
    behind={
        "cuda": ("v13_dispatch", "v05_rows_per_block", "v02_online"),
        "triton": ("v13_dispatch", "v08_cooperative"),
    },
    steps=(
        Step(
            name="v01_three_passes",
            predictions=(
                Prediction("dram_share", "<=", 60, backends=("cuda",)),
                Prediction("dram_share", "<=", 80, backends=("triton",)),
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.1),
            ),
        ),
        Step(
            name="v02_online",
            predictions=(Prediction("time", "<=", 0.95, relative=True),),
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
            name="v04_vectorized",
            predictions=(
                Prediction("instructions", "<=", 0.7, relative=True),
                Prediction("sectors_per_load", "==", 16, tolerance=0.05),
                Prediction("dram_share", ">=", 85),
            ),
            accepts=row_cases.fits(64 * 1_024, "registers hold"),
            no_triton="Triton chooses the width of an access by itself; its v03 has 16 bytes wherever rows are "
            "aligned.",
        ),
        Step(
            name="v05_rows_per_block",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.03),
                Prediction("time", "<=", 0.6, relative=True, case=row_cases.SHORTEST),
            ),
            accepts=row_cases.fits(64 * 1_024, "registers hold"),
            standalone=True,
        ),
        Step(
            name="v06_pipelined",
            predictions=(Prediction("dram_share", ">=", 88),),
            arch=">=9.0",
            accepts=row_cases.fits(220 * 1_024, "shared memory holds"),
        ),
        Step(
            name="v07_cluster",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("time", "<=", 0.95, relative=True, case=row_cases.LONG),
                Prediction("l2_bytes", "==", 1_074, tolerance=0.02, case=row_cases.LONGEST),
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.03, case=row_cases.LONGEST),
                Prediction("dram_share", "==", 84, tolerance=0.04, case=row_cases.LONGEST),
                Prediction("occupancy", "==", 70, tolerance=0.08, case=row_cases.LONGEST),
            ),
            arch=">=9.0",
            no_triton=f"{row_cases.NO_CLUSTERS}; v08_cooperative goes through L2.",
            profile_case={"cuda": row_cases.LONGEST},
        ),
        Step(
            name="v08_cooperative",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.03),
                Prediction("time", "<=", 0.9, relative=True, case=row_cases.LONG),
            ),
            no_cuda="CUDA's v07_cluster does the same within a cluster, without going through L2.",
        ),
        Step(
            name="v10_cluster_registers",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("time", "<=", 0.98, relative=True, case=row_cases.LONG),
                Prediction("time", "<=", 0.97, relative=True, case=row_cases.LONG_RAGGED),
                Prediction("time", "<=", 363, case=row_cases.LONG_RAGGED),
                Prediction("time", "<=", 363, case=row_cases.LONG),
                Prediction("time", "<=", 363, case=row_cases.LONGEST),
                Prediction("shared_memory", "<=", 2, case=row_cases.LONG),
                Prediction("load_requests", "==", 1.05, tolerance=0.02, case=row_cases.LONG),
                Prediction("dram_share", ">=", 89, case=row_cases.LONG),
            ),
            arch=">=9.0",
            no_triton=f"{row_cases.NO_CLUSTERS}; v08_cooperative's programs hold their parts in registers, too, and "
            "exchange through L2.",
            profile_case={"cuda": row_cases.LONG},
        ),
        Step(
            name="v13_dispatch",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.01),
                Prediction("time", "<=", 0.997, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.996, relative=True, case=row_cases.SHORT, backends=("cuda",)),
                Prediction("time", "<=", 0.87, relative=True, case=_SHORT_RAGGED, backends=("cuda",)),
                Prediction("time", "<=", 1.0, relative=True, case=row_cases.RAGGED, backends=("cuda",)),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.005, case=row_cases.LONG, backends=("cuda",)),
                Prediction("time", "<=", 0.95, relative=True, case=_SHORT_RAGGED, backends=("triton",)),
            ),
            arch=">=9.0",
            replaces="v05_rows_per_block",
        ),
    ),
)

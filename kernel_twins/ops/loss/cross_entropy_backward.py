"""The gradient of the logits through cross_entropy, from the logits and the forward pass's lse; fp32 inside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel_twins.errors import UnavailableError
from kernel_twins.ops import baselines, in_parts, row_cases
from kernel_twins.ops.loss import shared
from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor


def _inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """Logits, classes, lse (the logarithms of the rows' sums), and dout, the gradient of the losses.

    With ``dout.scalar`` it is one number for all rows.
    """
    import torch

    logits, target = shared.logits_and_target(case, generator)
    ignore_index = shared.options(case)["ignore_index"]
    lse, _ = in_parts.over_rows(
        slice(0, case.shape[0]),
        case.shape[1],
        lambda chunk: shared.log_sums(logits[chunk].double(), target[chunk], ignore_index),
    )
    scalar = case.get("dout") == "scalar"
    dout = torch.randn(() if scalar else case.shape[:1], generator=generator, device=generator.device)
    return logits, target, lse.float(), dout.expand(case.shape[:1])


def _reference(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    import torch

    logits, target, lse, dout = inputs
    x, classes, sums, scale = logits[part].double(), target[part], lse[part, None].double(), dout[part, None].double()
    n, smoothing = x.shape[1], shared.options(case)["label_smoothing"]
    ignored = (classes == shared.options(case)["ignore_index"])[:, None]
    p = torch.exp(x - sums)
    terms = p * (1 + (x - sums).abs() + x.abs()).nan_to_num(0.0, 0.0, 0.0)
    if n == 0:
        return p, terms
    wanted = torch.full_like(x, smoothing / n)
    wanted.scatter_add_(1, classes.masked_fill(ignored[:, 0], 0)[:, None], torch.full_like(sums, 1 - smoothing))
    return ((p - wanted) * scale).masked_fill(ignored, 0.0), ((terms + wanted) * scale.abs()).masked_fill(ignored, 0.0)


def _check(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    out: Tensor,
    ignore_index: int = shared.IGNORED,
    label_smoothing: float = 0.0,
) -> None:
    """logits: [M, N], contiguous rows at any distance, fp32, bf16 or fp16; target: [M], int64, contiguous.

    lse: [M], contiguous, dout: [M], any stride, fp32; out: [M, N], contiguous, of the logits' dtype. A row with the
    target ``ignore_index`` gets zeros; a row whose target is no class gets NaN.
    """
    from kernel_twins.ops.row_checks import require_all_apart, require_numbers, require_result
    from kernel_twins.ops.tensors import require_contiguous

    shared.require_inputs(logits, target, label_smoothing)
    require_numbers("lse", lse, "logits", logits)
    require_contiguous("lse", lse)
    require_numbers("dout", dout, "logits", logits)
    require_result(out, "logits", logits)
    require_all_apart(out, {"logits": logits, "target": target, "lse": lse, "dout": dout})


def _torch(*inputs: Tensor, out: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """PyTorch's autograd, with log_softmax before it: PyTorch would have kept that result, as large as the logits."""
    import torch

    logits, target, _, dout = inputs
    if logits.shape[1] == 0:
        return out
    log_p = torch.log_softmax(logits, dim=1)
    ignored = target == ignore_index
    row_dout = dout.to(logits.dtype).masked_fill(ignored, 0.0)[:, None]
    dlog_p = torch.zeros_like(log_p)
    dlog_p.scatter_(1, target.masked_fill(ignored, 0)[:, None], (label_smoothing - 1) * row_dout)
    if label_smoothing:
        dlog_p -= label_smoothing / logits.shape[1] * row_dout
    return torch._log_softmax_backward_data(dlog_p, log_p, 1, logits.dtype)


def _function(
    logits: Tensor, target: Tensor, lse: Tensor, dout: Tensor, *, ignore_index: int, label_smoothing: float
) -> Tensor:
    """The formula; torch.compile makes one kernel of it."""
    import torch

    n = logits.shape[1]
    p = torch.exp(logits.float() - lse[:, None])
    hit = torch.arange(n, device=logits.device) == target[:, None]
    dx = (p - label_smoothing / max(1, n) - hit * (1 - label_smoothing)) * dout[:, None]
    return dx.masked_fill((target == ignore_index)[:, None], 0.0).to(logits.dtype)


def _quack(*inputs: Tensor, out: Tensor, ignore_index: int, label_smoothing: float) -> None:
    logits, target, lse, dout = inputs
    if label_smoothing:
        raise UnavailableError("quack-kernels has no label smoothing")
    ops = baselines.quack("cross_entropy", logits)
    ops.cross_entropy_bwd_out(logits, target, dout, lse, out, None, ignore_index)


_PROFILE_CASE = shared.PROFILE_CASE
_PITCHED = row_cases.bandwidth_case(2_000, logits="pitched")

OP = Op(
    name="cross_entropy_backward",
    family="loss",
    chapter=14,
    title="Cross entropy, backward",
    summary="`dx = (exp(x - lse) - (1 if target else 0)) * dout` for every logit: as the forward pass kept a number of "
    "each row, no sum is needed, and reading and writing are all there is.",
    inputs=_inputs,
    hostile=True,
    outputs=lambda case: (Output(case.shape, case.dtype),),
    reference=_reference,
    check=_check,
    options=shared.options,
    test_cases=shared.test_cases(
        *((9, n, {"dout": "scalar"}) for n in (1_024, 5_003)),
        # Rows of another skew than out's, with every number of lanes and of parts; and rows of a few packs a warp.
        *((19, n, {"logits": "pitched"}) for n in (5, 12, 27, 60, 100, 120, 250, 500, 777, 1_025, 1_944, 8_120)),
        *((19, n, {"logits": "expanded", "target": "ignored"}) for n in (777, 1_027, 5_003)),
        *((9, n, {"values": "edges", "target": "last", "logits": "pitched"}) for n in (777, 1_944)),
        *((9, 1_944, {"values": values, "logits": "pitched"}) for values in ("inf", "infs", "nan", "masked")),
        *((19, n, {"smoothing": "tenth"}) for n in (1_783, 3_001, 8_184, 8_200)),
    ),
    huge_cases=shared.HUGE_CASES,
    bench_cases=(*shared.BENCH_CASES, _PITCHED),
    headline_cases=shared.HEADLINE_CASES,
    size_axis=row_cases.SIZE_AXIS,
    profile_case=_PROFILE_CASE,
    ceiling="dram_copy",
    flops=lambda case: 4 * math.prod(case.shape),  # difference, exponential, difference, product
    bytes=lambda case: 2 * math.prod(case.shape) * ITEMSIZE[case.dtype],
    baselines={"torch": _torch, "compile": baselines.compiled(_function), "quack": _quack},
    behind={"cuda": ("v04_dispatch",), "triton": ("v03_rows_per_block",)},
    steps=(
        Step(
            name="v01_scalar",
            predictions=(
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.05),
                Prediction("dram_share", "<=", 75, backends=("cuda",)),
                Prediction("dram_share", ">=", 75, backends=("triton",)),
            ),
            accepts=shared.in_one_grid,
        ),
        Step(
            name="v02_vectorized",
            predictions=(
                Prediction("instructions", "<=", 0.6, relative=True),
                Prediction("time", "<=", 0.8, relative=True),
                Prediction("dram_share", ">=", 86),
                Prediction("time", "<=", 380),
            ),
            no_triton="Triton chooses the width of an access by itself; its v01 has 16 bytes wherever rows are "
            "aligned.",
        ),
        Step(
            name="v03_rows_per_block",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02, backends=("cuda",)),
                Prediction("dram_share", ">=", 86),
                Prediction("time", "<=", 385, case=row_cases.SHORT),
                Prediction("instructions", "<=", 0.25, relative=True, backends=("cuda",), case=row_cases.SHORT),
                Prediction("load_requests", "==", 0.25, relative=True, backends=("cuda",), case=row_cases.SHORT),
                Prediction("dram_share", ">=", 88, backends=("cuda",), case=row_cases.SHORT),
            ),
            profile_case={"cuda": row_cases.SHORT},
        ),
        Step(
            name="v04_dispatch",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.01),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02, case=row_cases.SHORT),
                Prediction("time", "<=", 0.5, relative=True, case=_PITCHED),
                Prediction("instructions", "<=", 0.7, relative=True, case=_PITCHED),
                Prediction("dram_share", ">=", 80, case=_PITCHED),
            ),
            no_triton="Triton cannot load a vector whose address it does not know to be a multiple of its size.",
            profile_case={"cuda": _PITCHED},
            replaces="v02_vectorized",
        ),
    ),
)

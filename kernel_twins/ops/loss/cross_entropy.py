"""Cross entropy of a matrix of logits and its rows' classes; no probability is stored, fp32 inside and out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kernel_twins.errors import UnavailableError
from kernel_twins.ops import baselines, draws, in_parts, row_cases
from kernel_twins.ops.loss import shared
from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor


def _inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    return shared.logits_and_target(case, generator)


def _outputs(case: Case) -> tuple[Output, ...]:
    """The rows' losses and, if asked for, lse, which the backward pass needs."""
    numbers = Output(case.shape[:1], "fp32")
    return (numbers, numbers) if case.get("lse") == "yes" else (numbers,)


def _losses(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    from torch.nn.functional import cross_entropy

    logits, target = inputs
    options = shared.options(case)

    def of(chunk: slice) -> tuple[Tensor, Tensor]:
        x, classes = logits[chunk].double(), target[chunk]
        exact = cross_entropy(x, classes, reduction="none", **options)
        _, terms = shared.log_sums(x, classes, options["ignore_index"])
        ignored = classes == options["ignore_index"]
        if x.shape[1]:
            most = x.amax(dim=1)
            terms = terms + (most - x.gather(1, classes.masked_fill(ignored, 0)[:, None])[:, 0]).abs()
        if smoothing := options["label_smoothing"]:
            terms = terms + smoothing * (most.abs() + x.abs().mean(dim=1))
        return exact, terms.masked_fill(ignored, 0.0)

    return in_parts.over_rows(part, logits.shape[1], of)


def _lse(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    logits, target = inputs
    ignore_index = shared.options(case)["ignore_index"]

    def of(chunk: slice) -> tuple[Tensor, Tensor]:
        lse, terms = shared.log_sums(logits[chunk].double(), target[chunk], ignore_index)
        return lse, terms + lse.abs()

    return in_parts.over_rows(part, logits.shape[1], of)


def _check(
    logits: Tensor,
    target: Tensor,
    *,
    out: Tensor | tuple[Tensor, ...],
    ignore_index: int = shared.IGNORED,
    label_smoothing: float = 0.0,
) -> None:
    """logits: [M, N], contiguous rows at any distance, fp32, bf16 or fp16; target: [M], int64, contiguous.

    out: the losses, or a tuple of losses and lse, the logarithms of the sums of exponentials; [M], contiguous, fp32. A
    row with the target ``ignore_index`` gets 0 in both; a row whose target is no class gets a loss of NaN.
    """
    from kernel_twins.ops.row_checks import require_all_apart, require_out

    shared.require_inputs(logits, target, label_smoothing)
    require_out(out, ["losses", "lse"] if isinstance(out, tuple) else ["losses"], "logits", logits)
    require_all_apart(out, {"logits": logits, "target": target})


def _function(logits: Tensor, target: Tensor, *, ignore_index: int, label_smoothing: float) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits, target, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing)


def _torch(logits: Tensor, target: Tensor, *, out: Tensor | tuple[Tensor, ...], **options: Any) -> None:
    """PyTorch rounds its losses to the logits' dtype, and with smoothing its sum of logarithms overflows fp16."""
    import torch

    first, *lse = out if isinstance(out, tuple) else (out,)
    if logits.dtype == torch.float16 and options["label_smoothing"]:
        logits = logits.float()
    first.copy_(_function(logits, target, **options))
    for each in lse:  # PyTorch returns none: it keeps all logarithms of probabilities instead
        sums = torch.logsumexp(logits.float(), dim=1) if logits.shape[1] else torch.zeros_like(each)
        sums = torch.where(sums == math.inf, math.nan, sums)
        each.copy_(sums.masked_fill(target == options["ignore_index"], 0.0))


def _compiled(logits: Tensor, target: Tensor, *, out: Tensor | tuple[Tensor, ...], **options: Any) -> None:
    if isinstance(out, tuple):
        raise UnavailableError("PyTorch's cross_entropy does not return the logarithms of the sums")
    _COMPILED(logits, target, out=out, **options)


_COMPILED = baselines.compiled(_function)


def _liger(logits: Tensor, target: Tensor, *, out: Tensor | tuple[Tensor, ...], **options: Any) -> None:
    """Liger's kernel with Liger's own settings, without the gradient; its function would read back from the GPU."""
    if isinstance(out, tuple):
        raise UnavailableError("liger-kernel does not return the logarithms of the sums")
    (m, n), most = logits.shape, 32_768
    ops, _ = baselines.liger("cross_entropy", min(n, most))
    block_size = min(most, 1 << max(0, n - 1).bit_length())
    out.zero_()  # Liger's kernel does not write the losses of ignored rows
    if m == 0:
        return
    ops.liger_cross_entropy_kernel[(m,)](
        X_ptr=logits, X_stride=logits.stride(0), Y_ptr=target, Y_stride=1, weight_ptr=None, loss_ptr=out,
        z_loss_ptr=None, loss_stride=1, token_accuracy_ptr=None, token_accuracy_stride=0, predicted_tokens_ptr=None,
        predicted_tokens_stride=0, n_cols=n, n_non_ignore=m, sum_non_ignore_weight=m, weight_sum=0.0,
        lse_square_scale=0.0, reduction="none", softcap=None, RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False, BLOCK_SIZE=block_size, HAS_WEIGHT=False, HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=False, num_warps=32, **options,
    )  # fmt: skip


def _quack(logits: Tensor, target: Tensor, *, out: Tensor | tuple[Tensor, ...], **options: Any) -> None:
    if options["label_smoothing"]:
        raise UnavailableError("quack-kernels has no label smoothing")
    loss, *lse = out if isinstance(out, tuple) else (out,)
    ops = baselines.quack("cross_entropy", logits)
    ops.cross_entropy_fwd_out(logits, target, None, loss, lse[0] if lse else None, None, None, options["ignore_index"])


_LSE = {"lse": "yes"}
_SMALL, _LARGE = (row_cases.bandwidth_case(n) for n in (32_768, 151_936))
_FEW = Case.of(512, 151_936, dtype="bf16")
_SMOOTHED = row_cases.bandwidth_case(131_072, smoothing="tenth")


def _differs(baseline: str, case: Case) -> str:
    if baseline == "liger" and case.get("target") == "ignored":
        return "Liger writes gradients over its logits, even where nobody asks for one: zeros where a row is ignored"
    return row_cases.sum_of_exponentials_differs(baseline, case)


OP = Op(
    name="cross_entropy",
    family="loss",
    chapter=13,
    title="Cross entropy",
    summary="`loss = log(sum(exp(x))) - x[target]` for every row of a matrix of logits, as many as a vocabulary "
    "has words: all are read, and one number a row is written.",
    inputs=_inputs,
    hostile=True,
    draw=draws.rows_of("logits", ({}, {"target": "ignored"}, {"smoothing": "tenth"}), draws.VOCABULARIES),
    outputs=_outputs,
    reference=_losses,
    more_references=(_lse,),
    check=_check,
    options=shared.options,
    test_cases=shared.test_cases(
        *((9, n, _LSE) for n in (31, 1_024, 5_003, 70_000)),
        (9, 1_003, {**_LSE, "target": "ignored", "smoothing": "tenth"}),
        *((5, 1_003, {**_LSE, "values": values}) for values in ("inf", "infs", "nan", "masked")),
        # Short rows at distances that leave them single elements, a part of a vector, or a whole one.
        *((67, n, {"logits": "spaced", "smoothing": "tenth"}) for n in (20, 64, 300)),
        *((67, n, {"logits": "pitched", "smoothing": "tenth"}) for n in (12, 64, 777)),
        *((9, 64, {"values": values, "logits": "spaced", "smoothing": "tenth"}) for values in ("infs", "nan")),
        (9, 3_520, {"target": "ignored", "logits": "pitched"}),
    ),
    huge_cases=shared.HUGE_CASES,
    bench_cases=shared.BENCH_CASES,
    headline_cases=shared.HEADLINE_CASES,
    size_axis=row_cases.SIZE_AXIS,
    profile_case=shared.PROFILE_CASE,
    ceiling="dram_read",
    flops=lambda case: 4 * math.prod(case.shape),  # maximum, difference, exponential, sum
    bytes=lambda case: math.prod(case.shape) * ITEMSIZE[case.dtype],
    differs=_differs,
    baselines={"torch": _torch, "compile": _compiled, "liger": _liger, "quack": _quack},
    behind={"cuda": ("v05_cluster", "v04_rows_per_block"), "triton": ("v06_dispatch", "v04_rows_per_block")},
    steps=(
        Step(
            name="v01_two_passes",
            predictions=(
                Prediction("bytes_over_minimum", "==", 2.0, tolerance=0.1),
                Prediction("dram_share", "<=", 75, backends=("cuda",)),
                Prediction("dram_share", ">=", 75, backends=("triton",)),
            ),
            accepts=shared.in_one_grid,
        ),
        Step(
            name="v02_online",
            predictions=(
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.05),
                Prediction("time", "<=", 0.8, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.6, relative=True, backends=("triton",)),
            ),
            accepts=shared.in_one_grid,
        ),
        Step(
            name="v03_vectorized",
            predictions=(
                Prediction("instructions", "<=", 0.45, relative=True),
                Prediction("time", "<=", 0.6, relative=True),
                Prediction("dram_share", ">=", 86),
                Prediction("time", "<=", 192, case=_SMALL),
                Prediction("time", "<=", 192, case=_LARGE),
                Prediction("time", "<=", 196, case=_SMOOTHED),
            ),
            no_triton="Triton chooses the width of an access by itself; its v01 has 16 bytes wherever rows are "
            "aligned.",
        ),
        Step(
            name="v04_rows_per_block",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02, backends=("cuda",)),
                Prediction("dram_share", ">=", 86),
                Prediction("time", "<=", 196, case=row_cases.SHORT),
                Prediction("instructions", "<=", 0.35, relative=True, backends=("cuda",), case=row_cases.SHORT),
                Prediction("load_requests", "==", 0.46, relative=True, backends=("cuda",), case=row_cases.SHORT),
                Prediction("dram_share", ">=", 89, backends=("cuda",), case=row_cases.SHORT),
            ),
            profile_case={"cuda": row_cases.SHORT},
        ),
        Step(
            name="v05_cluster",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.01),
                Prediction("time", "<=", 57, case=_FEW),
                Prediction("instructions", "==", 1.2, relative=True, tolerance=0.08, case=_FEW),
                Prediction("occupancy", ">=", 1.2, relative=True, case=_FEW),
                Prediction("dram_share", "<=", 1.0, relative=True, case=_FEW),
            ),
            arch=">=9.0",
            no_triton=f"{row_cases.NO_CLUSTERS}.",
            profile_case={"cuda": _FEW},
            replaces="v03_vectorized",
        ),
        Step(
            name="v06_dispatch",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.03),
                Prediction("dram_share", ">=", 86),
                Prediction("time", "<=", 0.95, relative=True, case=_FEW),
                Prediction("time", "<=", 0.8, relative=True, case=row_cases.LONG_RAGGED),
            ),
            no_cuda="CUDA's loads have 16 bytes since v03 wherever a row starts, and its v05_cluster splits few rows.",
            launches=2,
        ),
    ),
)

"""Inputs, references, checks and cases for the specs of cross_entropy, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_twins.ops import row_cases
from kernel_twins.spec import Case

if TYPE_CHECKING:
    from torch import Generator, Tensor

IGNORED = -100  # PyTorch's default ignore_index

_PEAK = 12.0
_FAR = 1_000.0
_SMOOTHING = {"": 0.0, "tenth": 0.1, "all": 1.0}

BENCH_CASES = (
    *(row_cases.bandwidth_case(n) for n in (1_024, 32_768, 50_257, 131_072, 151_936)),
    row_cases.bandwidth_case(32_768, "fp32"),
    row_cases.bandwidth_case(131_072, smoothing="tenth"),
    Case.of(512, 151_936, dtype="bf16"),
)
HEADLINE_CASES = (
    *(row_cases.bandwidth_case(n) for n in (32_768, 131_072, 151_936)),
    Case.of(512, 151_936, dtype="bf16"),
)
PROFILE_CASE = row_cases.bandwidth_case(131_072)
HUGE_CASES = (Case.of(2**21 + 3, 1_025, dtype="bf16"), Case.of(2_049, 2**20, dtype="bf16"))


# ----------------------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------------------


def logits_and_target(case: Case, generator: Generator) -> tuple[Tensor, Tensor]:
    """Logits with the case's layout and values, and classes.

    ``values`` may also be ``edges``: the first and the last logit of a row outweigh all others, so that a kernel which
    misses one is far off. ``target`` may be ``ignored``, which ignores every third row, or ``first`` or ``last``, which
    gives all rows that class.
    """
    import torch

    from kernel_twins.ops.tensors import borders

    m, n = case.shape
    logits = row_cases.lifted(row_cases.matrix(case, generator, case.get("logits")), case)
    if case.get("values") == "hostile":  # smoothing takes the logits' mean
        logits[1::2, borders(n)] -= _FAR
    if case.get("values") == "edges":
        logits[:, 0] = logits[:, n - 1] = _PEAK
    target = torch.randint(0, max(1, n), (m,), generator=generator, device=generator.device)
    if case.get("target") == "first":
        target[:] = 0
    if case.get("target") == "last":
        target[:] = n - 1
    if case.get("target") == "ignored":
        target[::3] = options(case)["ignore_index"]
    if n == 0:  # no class exists
        target[:] = options(case)["ignore_index"]
    return logits, target


def options(case: Case) -> dict[str, Any]:
    return {
        "ignore_index": int(case.get("ignore", str(IGNORED))),
        "label_smoothing": _SMOOTHING[case.get("smoothing")],
    }


def in_one_grid(case: Case) -> str:
    """A step's ``accepts``: one block for each row, and a grid has fewer than 2^31 blocks."""
    most = 2**31 - 1
    return "" if case.shape[0] <= most else f"there are {case.shape[0]} rows, a grid has {most} blocks"


def test_cases(*more: row_cases.Sized) -> tuple[Case, ...]:
    """The test cases of all operations along rows, and ``more``, each in every dtype."""
    ignored, tenth = {"target": "ignored"}, {"smoothing": "tenth"}
    return row_cases.test_cases(
        "logits",
        *row_cases.masked_cases(tenth),
        *row_cases.option_cases(tenth),
        *((9, n, {"values": "edges", "target": "first"}) for n in (33, 1_003, 5_003, 70_001)),
        (9, 5_003, {"values": "edges", "target": "last", "logits": "pitched"}),
        (2, 2**20, {}),
        (67, 31, ignored),
        *((9, n, ignored) for n in (1_024, 5_003, 70_000)),
        (9, 1_003, {"target": "ignored", "ignore": "5", "smoothing": "tenth"}),
        (9, 1_003, {"smoothing": "all"}),
        *((5, 1_003, {"values": values, "smoothing": "tenth"}) for values in ("infs", "nan")),
        *more,
    )


# ----------------------------------------------------------------------------------------------------------------------
# References
# ----------------------------------------------------------------------------------------------------------------------


def log_sums(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """lse of each row of float64, 0 for ignored rows, and the terms of lse minus the row's maximum.

    Plus infinity minus itself is NaN in PyTorch's log_softmax, and here. The relative error of exp is the rounding
    error of its argument, so the distance to the maximum counts among the terms. So does the sum; its terms are
    positive.
    """
    import torch

    if logits.shape[1] == 0:
        return (torch.zeros_like(target, dtype=torch.float64),) * 2
    lse = torch.logsumexp(logits, dim=1)
    lse = torch.where(lse == float("inf"), float("nan"), lse)
    most = logits.amax(dim=1)
    distance = (most[:, None] - logits).nan_to_num(0.0, 0.0, 0.0)
    of_sum = 1 + row_cases.row_chain(logits.shape[1])
    weighted = ((of_sum + distance) * torch.exp(logits - lse[:, None])).sum(dim=1)
    ignored = target == ignore_index
    return lse.masked_fill(ignored, 0.0), (weighted + (lse - most).abs()).masked_fill(ignored, 0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Checks
# ----------------------------------------------------------------------------------------------------------------------


def require_inputs(logits: Tensor, target: Tensor, label_smoothing: float) -> None:
    """Logits: [M, N], contiguous rows at any distance, fp32, bf16 or fp16; target: [M] of int64, contiguous."""
    from kernel_twins.ops.row_checks import require_rows
    from kernel_twins.ops.tensors import require_contiguous, require_device, require_dtype, require_shape

    require_rows("logits", logits)
    require_dtype("target", target, "int64")
    require_device("target", target, "logits", logits)
    require_shape("target", target, tuple(logits.shape[:1]), "one class for each row of logits")
    require_contiguous("target", target)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, must be from 0 to 1")

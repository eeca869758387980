"""``out = dropout(activation(x + bias)) + residual`` over the rows of a matrix; fp32 inside, and no mask is stored."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel_twins.ops import baselines, draws, ptx, row_cases
from kernel_twins.ops.dropout import shared
from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor


def _inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """x, then a residual laid out as x, and a bias, if the case has them."""
    x = row_cases.matrix(case, generator, case.get("x"))
    if case.get("residual") != "yes":
        return (x,)
    residual = row_cases.matrix(case.but(values=""), generator, case.get("x"))
    return x, residual, *shared.bias(case, generator)


# The error of gelu's short form in half precision (3e-5 of its distance to relu, cuda-kernels/lib/activation.cuh), in
# units of 4 eps(fp32). It is small beside the result's rounding, but a residual may cancel most of the result.
_SHORT_FORM = 64


def _reference(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    """No activation's slope exceeds 1.13 in magnitude, so an error of x + bias grows by at most that factor."""
    import torch

    from kernel_twins.ops.activations import ACTIVATIONS

    x, residual, bias = shared.operands(inputs)
    options = shared.options(case)
    p, activation = options["p"], options.pop("activation")
    z, terms = x[part].double(), x[part].double().abs()
    if bias is not None:
        z, terms = z + bias.double(), terms + bias.double().abs()
    kept = shared.kept(case.shape, part, x.device, **options)
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    out = torch.where(kept, ACTIVATIONS[activation](z) * shared.scale(p), zero)
    terms = torch.where(kept, 1.13 * shared.scale(p) * terms, zero)
    if activation == "gelu" and case.dtype != "fp32":
        terms += _SHORT_FORM * (out - torch.where(kept, z.clamp_min(0) * shared.scale(p), zero)).abs()
    if residual is None:
        return out, terms
    added = residual[part].double()
    return out + added, terms + added.abs()


def _check(
    x: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    p: float = shared.P,
    activation: str = "none",
    seed: int = 0,
    offset: int = 0,
) -> None:
    """x, residual: [M, N], contiguous rows at any distance, fp32, bf16 or fp16; bias: [N]; out: [M, N], contiguous.

    seed, offset: where the random numbers start, 64 bits each.
    """
    from kernel_twins.ops import row_checks

    row_checks.require_rows("x", x)
    row_checks.require_matrix("residual", residual, "x", x)
    row_checks.require_vector("bias", bias, "x", x)
    shared.check_options(p, activation, seed, offset)
    row_checks.require_out(out, ["out"], "x", x)
    row_checks.require_all_apart(out, {"x": x, "residual": residual, "bias": bias})


def _torch(
    *inputs: Tensor, out: Tensor | None = None, p: float = shared.P, activation: str = "none", **_: int
) -> Tensor:
    """The user's code in PyTorch; its mask comes from PyTorch's own generator."""
    from torch.nn import functional

    from kernel_twins.ops.activations import ACTIVATIONS

    x, residual, bias = shared.operands(inputs)
    y = functional.dropout(ACTIVATIONS[activation](x if bias is None else x + bias), p)
    return y if residual is None else y + residual


def _exemplar(
    *inputs: Tensor, out: Tensor, p: float = shared.P, activation: str = "none", seed: int = 0, offset: int = 0
) -> None:
    """The same operations at the same dtype, with the mask of the seed and the offset."""
    import torch

    from kernel_twins.ops.activations import ACTIVATIONS

    x, residual, bias = shared.operands(inputs)
    y = ACTIVATIONS[activation](x if bias is None else x + bias)
    kept = shared.kept(tuple(x.shape), slice(0, x.shape[0]), x.device, p=p, seed=seed, offset=offset)
    y = torch.where(kept, y * shared.scale(p), torch.zeros((), dtype=x.dtype, device=x.device))
    out.copy_(y if residual is None else y + residual)


def _bytes(case: Case) -> int:
    """x, out and, if there is one, the residual. The bias is left out as negligible."""
    return (3 if case.get("residual") == "yes" else 2) * math.prod(case.shape) * ITEMSIZE[case.dtype]


def _without_activation(case: Case) -> str:
    return f"activation is {case.get('act')}, v02_four_words applies it" if case.get("act") else ""


_BOTH = {"residual": "yes", "bias": "yes"}
_GELU = {**_BOTH, "act": "gelu"}
_DRAWN_OPTIONS = tuple(
    {"p": "10", **operands, **({"act": activation} if activation != "none" else {})}
    for activation in ("none", "gelu", "none", "silu", "relu", "gelu_tanh")
    for operands in ({}, {"residual": "yes"}, _BOTH)
)
_PROFILE_CASE = row_cases.bandwidth_case(4_096, p="10", **_BOTH)
_PLAIN = row_cases.bandwidth_case(4_096, p="10")
_GELU_CASE = row_cases.bandwidth_case(4_096, p="10", **_GELU)
_ODD = row_cases.bandwidth_case(5_003, p="10", **_BOTH)

OP = Op(
    name="dropout_add",
    family="dropout",
    chapter=15,
    title="Dropout and residual",
    summary="`out = dropout(activation(x + bias)) + residual`: random numbers are computed where they are needed, and "
    "may take no longer than the memory takes anyway.",
    rounds="The activation's result, which may be larger than what is left with the residual.",
    inputs=_inputs,
    draw=draws.rows_of("x", _DRAWN_OPTIONS, a_block_each=False),
    outputs=lambda case: (Output(case.shape, case.dtype),),
    reference=_reference,
    check=_check,
    options=shared.options,
    test_cases=row_cases.test_cases(
        "x",
        *row_cases.option_cases({"residual": "yes"}),
        *row_cases.option_cases(_BOTH),
        *((9, n, {**_BOTH, "act": activation}) for activation in shared.ACTIVATIONS[1:] for n in (1_000, 1_003)),
        *((33, n, {**_BOTH, "p": p}) for p in ("0", "1", "10", "99", "100") for n in (264, 257)),
        *((33, n, {**_GELU, "seed": "large"}) for n in (264, 257)),
        *((19, n, {**_GELU, "x": layout}) for n in (40, 1_027, 1_032) for layout in ("pitched", "expanded")),
        *((19, n, {"residual": "yes", "x": "pitched"}) for n in (1_027, 1_032)),
        *((9, n, {**_GELU, "offset": "1"}) for n in (8, 5_003)),
        *((m, n, _BOTH) for m, n in ((1_000, 1), (700, 2), (500, 3), (300, 5), (300, 7), (200, 12))),
        *((5, 1_003, {"values": values, "act": "relu", "p": p}) for values in ("infs", "nan") for p in ("0", "100")),
    ),
    huge_cases=(Case.of(2**21 + 3, 1_025, dtype="bf16", **_BOTH),),
    bench_cases=(
        _PROFILE_CASE,
        _PLAIN,
        _GELU_CASE,
        row_cases.bandwidth_case(1_024, p="10", **_BOTH),
        _ODD,
        row_cases.bandwidth_case(4_096, "fp32", p="10", **_BOTH),
        Case.of(4_096, 1_024, dtype="bf16", p="10", **_BOTH),
    ),
    headline_cases=(_PROFILE_CASE, _PLAIN, _GELU_CASE),
    size_axis=row_cases.SIZE_AXIS,
    profile_case=_PROFILE_CASE,
    ceiling="dram_copy",
    flops=lambda case: 4 * math.prod(case.shape),  # two sums, a product, and a choice
    bytes=_bytes,
    baselines={"torch": _torch, "compile": baselines.compiled(_torch)},
    exemplar=_exemplar,
    settled=shared.settled,
    behind={"cuda": ("v05_more_warps",), "triton": ("v02_four_words",)},
    steps=(
        Step(
            name="v01_scalar",
            predictions=(
                Prediction("dram_share", "<=", 60),
                Prediction("instructions", ">=", 1_000, backends=("cuda",)),
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.1),
            ),
        ),
        Step(
            name="v02_four_words",
            predictions=(
                Prediction("instructions", "<=", 0.6, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.7, relative=True),
                Prediction("dram_share", ">=", 85, backends=("triton",)),
                Prediction("time", "<=", 410, case=_PLAIN, backends=("triton",)),
            ),
            promises={80: (ptx.LOAD_16_BYTES_HINTED,), 90: (ptx.LOAD_16_BYTES_HINTED,)},
        ),
        Step(
            name="v03_vectorized",
            predictions=(
                Prediction("sectors_per_load", ">=", 12),
                Prediction("dram_share", ">=", 88),
                Prediction("instructions", "<=", 0.5, relative=True),
                Prediction("time", "<=", 587),
                Prediction("time", "<=", 395, case=_PLAIN),
                Prediction("time", "<=", 610, case=_ODD),
            ),
            no_triton="Triton chooses the width of an access by itself: its v02 has 16 bytes wherever rows are "
            "aligned.",
        ),
        Step(
            name="v04_several_packs",
            predictions=(
                Prediction("instructions", "<=", 0.8, relative=True),
                Prediction("dram_share", ">=", 88),
                Prediction("time", "<=", 545),
                Prediction("time", "<=", 375, case=_PLAIN),
                Prediction("time", "<=", 560, case=_ODD),
            ),
            no_triton="A Triton program has several packs a thread where its block is larger: v02's list has both.",
        ),
        Step(
            name="v05_more_warps",
            predictions=(
                Prediction("occupancy", ">=", 50),
                Prediction("dram_share", ">=", 88),
                Prediction("time", "<=", 545),
                Prediction("time", "<=", 375, case=_PLAIN),
                Prediction("time", "<=", 567, case=_GELU_CASE),
                Prediction("time", "<=", 555, case=_ODD),
            ),
            no_triton="A Triton program of 128 threads has two packs a thread as well, and a kernel for each choice.",
        ),
        Step(
            name="v06_one_body",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.03),
                Prediction("instructions", "==", 1.0, relative=True, tolerance=0.1),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.03, case=_PLAIN),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.05, case=_ODD),
            ),
            accepts=_without_activation,
            no_cuda="CUDA's v05_more_warps has one body: its loads and stores have predicates.",
            standalone=True,
            promises={80: (ptx.LOAD_16_BYTES_HINTED,), 90: (ptx.LOAD_16_BYTES_HINTED,)},
        ),
    ),
)

"""``out = a @ b`` in true fp32: products and sums on the FMA pipes, no TF32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_twins.spec import Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor


def inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    from kernel_twins.tensors import normal

    m, n, k = case.shape
    a = normal(case, (m, k), generator)
    b = normal(case, (n, k), generator).t() if case.get("b") == "col" else normal(case, (k, n), generator)
    return a, b


def reference(case: Case, inputs: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, Tensor]:
    a, b = inputs[0][rows].double(), inputs[1].double()
    return a @ b, a.abs() @ b.abs()


def check(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """a: [M, K], b: [K, N], any strides; out: [M, N], contiguous; all fp32 on one device."""
    from kernel_twins.tensors import (
        require_apart,
        require_contiguous,
        require_device,
        require_dtype,
        require_rank,
        require_shape,
    )

    for name, tensor in (("a", a), ("b", b), ("out", out)):
        require_dtype(name, tensor, "fp32")
        require_rank(name, tensor, 2)
        require_device(name, tensor, "a", a)
    require_shape("b", b, (a.shape[1], b.shape[1]), "its rows are a's columns")
    require_shape("out", out, (a.shape[0], b.shape[1]), "a's rows by b's columns")
    require_contiguous("out", out)
    require_apart(out, "a", a)
    require_apart(out, "b", b)


def torch_mm(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    import torch

    if torch.backends.cuda.matmul.allow_tf32:
        raise RuntimeError(
            "allow_tf32 is on; this baseline is true fp32: torch.set_float32_matmul_precision('highest')"
        )
    torch.mm(a, b, out=out)


OP = Op(
    name="matmul_fp32",
    chapter=3,
    title="Matmul, fp32",
    summary="`out = a @ b` with fp32 products and sums. Each element is used N or M times: the ladder is about reuse.",
    inputs=inputs,
    outputs=lambda case: (Output((case.shape[0], case.shape[1]), "fp32"),),
    reference=reference,
    check=check,
    accepts=lambda case: "" if case.dtype == "fp32" else f"dtype is {case.dtype}, must be fp32",
    test_cases=tuple(
        Case.of(m, n, k, dtype="fp32", **variant)
        for m, n, k, variant in (
            (0, 5, 7, {}),
            (5, 0, 7, {}),
            (5, 7, 0, {}),
            (1, 1, 1, {}),
            (1, 257, 33, {}),
            (257, 1, 33, {}),
            (33, 65, 1, {}),
            (32, 32, 32, {}),
            (100, 70, 50, {"b": "col"}),
            (129, 127, 65, {}),
            (256, 256, 256, {}),
            (300, 200, 1_000, {}),
            (65, 66, 67, {"offset": "1"}),
            (64, 64, 64, {"values": "inf"}),
            (64, 64, 64, {"values": "nan"}),
        )
    ),
    bench_cases=tuple(
        Case.of(m, n, k, dtype="fp32")
        for m, n, k in (
            (1_024, 1_024, 1_024),
            (2_048, 2_048, 2_048),
            (4_096, 4_096, 4_096),
            (8_192, 8_192, 8_192),
            (3_333, 5_555, 7_777),
        )
    ),
    profile_case=Case.of(4_096, 4_096, 4_096, dtype="fp32"),
    ceiling="fp32",
    flops=lambda case: 2 * case.shape[0] * case.shape[1] * case.shape[2],
    bytes=lambda case: (
        4 * (case.shape[0] * case.shape[2] + case.shape[2] * case.shape[1] + case.shape[0] * case.shape[1])
    ),
    baselines={"torch": torch_mm},
    steps=(
        Step(
            name="v01_naive",
            change="One thread computes one element; neighbouring threads take neighbouring rows.",
            why="The formula as it is written. The 32 lanes of a warp read 32 rows of A, one sector each, so most of "
            "every sector fetched is thrown away, and nothing is reused but through the caches.",
            predictions=(
                Prediction("sectors_per_load", "==", 16.5, tolerance=0.05, backends=("cuda",)),
                Prediction("fma_pipe", "<=", 10),
            ),
        ),
        Step(
            name="v02_coalesced",
            change="Neighbouring threads take neighbouring columns.",
            why="A warp now reads one element of A (broadcast) and 32 neighbours of B (four sectors).",
            predictions=(
                Prediction("sectors_per_load", "==", 2.5, tolerance=0.05),
                Prediction("time", "<=", 0.2, relative=True),
            ),
            backends=("cuda",),
            gap="Triton's compiler assigns lanes along the contiguous dimension by itself; there is nothing to change.",
        ),
        Step(
            name="v03_shared_tile",
            change="Tiles of A and B are staged in shared memory and used by the whole block.",
            why="Each element fetched serves a whole row or column of the tile, so global traffic falls by the tile's "
            "width; what remains is one shared-memory load for nearly every FMA.",
            predictions=(
                Prediction("load_requests", "<=", 0.07, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.75, relative=True),
                Prediction("fma_pipe", "<=", 35, backends=("cuda",)),
            ),
        ),
    ),
)

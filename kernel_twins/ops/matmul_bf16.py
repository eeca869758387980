"""``out = a @ b`` for bf16 or fp16 operands, accumulated in fp32: the tensor cores' own product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_twins.spec import Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor

_CUDA_GAP = (
    "The CUDA ladder stops at the naive step so far; by hand this idea takes mma.sync or wgmma tiles, "
    "each a step of its own."
)


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
    """a: [M, K], b: [K, N], any strides; out: [M, N], contiguous; all bf16 or all fp16 on one device."""
    from kernel_twins.tensors import (
        require_apart,
        require_contiguous,
        require_device,
        require_dtype,
        require_rank,
        require_same_dtype,
        require_shape,
    )

    for name, tensor in (("a", a), ("b", b), ("out", out)):
        require_dtype(name, tensor, "bf16", "fp16")
        require_same_dtype(name, tensor, "a", a)
        require_rank(name, tensor, 2)
        require_device(name, tensor, "a", a)
    require_shape("b", b, (a.shape[1], b.shape[1]), "its rows are a's columns")
    require_shape("out", out, (a.shape[0], b.shape[1]), "a's rows by b's columns")
    require_contiguous("out", out)
    require_apart(out, "a", a)
    require_apart(out, "b", b)


def torch_mm(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    import torch

    torch.mm(a, b, out=out)


OP = Op(
    name="matmul_bf16",
    chapter=4,
    title="Matmul, bf16",
    summary="`out = a @ b` for bf16 or fp16 with fp32 sums. The ladder is about keeping the tensor cores fed.",
    inputs=inputs,
    outputs=lambda case: (Output((case.shape[0], case.shape[1]), case.dtype),),
    reference=reference,
    check=check,
    accepts=lambda case: "" if case.dtype in ("bf16", "fp16") else f"dtype is {case.dtype}, must be bf16 or fp16",
    test_cases=tuple(
        Case.of(m, n, k, dtype=dtype, **variant)
        for dtype in ("bf16", "fp16")
        for m, n, k, variant in (
            (0, 5, 7, {}),
            (5, 0, 7, {}),
            (5, 7, 0, {}),
            (1, 1, 1, {}),
            (1, 257, 33, {}),
            (257, 1, 33, {}),
            (33, 65, 1, {}),
            (64, 64, 64, {}),
            (100, 70, 50, {"b": "col"}),
            (129, 127, 65, {}),
            (256, 256, 256, {"b": "col"}),
            (300, 200, 1_000, {}),
            (65, 66, 67, {"offset": "1"}),
            (64, 64, 64, {"values": "inf"}),
            (64, 64, 64, {"values": "nan"}),
        )
    ),
    bench_cases=tuple(
        Case.of(m, n, k, dtype=dtype, **variant)
        for m, n, k, dtype, variant in (
            (1_024, 1_024, 1_024, "bf16", {}),
            (2_048, 2_048, 2_048, "bf16", {}),
            (4_096, 4_096, 4_096, "bf16", {}),
            (8_192, 8_192, 8_192, "bf16", {}),
            (4_096, 4_096, 4_096, "bf16", {"b": "col"}),
            (8_192, 8_192, 8_192, "bf16", {"b": "col"}),
            (4_096, 4_096, 4_096, "fp16", {}),
            (4_095, 4_097, 4_096, "bf16", {}),
            (3_333, 5_555, 7_777, "bf16", {}),
        )
    ),
    profile_case=Case.of(4_096, 4_096, 4_096, dtype="bf16"),
    ceiling="bf16",
    flops=lambda case: 2 * case.shape[0] * case.shape[1] * case.shape[2],
    bytes=lambda case: (
        2 * (case.shape[0] * case.shape[2] + case.shape[2] * case.shape[1] + case.shape[0] * case.shape[1])
    ),
    baselines={"torch": torch_mm},
    steps=(
        Step(
            name="v01_naive",
            change="One element at a time, no tensor cores.",
            why="The formula as it is written, with the lanes along the columns so that loads are coalesced. The "
            "tensor cores, which hold nearly all of this chip's arithmetic, stay idle.",
            predictions=(
                Prediction("tensor_pipe", "<=", 0.1),
                Prediction("ceiling_share", "<=", 2),
            ),
        ),
        Step(
            name="v02_dot",
            change="A block computes a tile with `tl.dot`, one K step after the other.",
            why="The product runs on the tensor cores; each tile of A and B is fetched once a block. Without "
            "pipelining the tensor cores wait for every fetch.",
            predictions=(
                Prediction("time", "<=", 0.05, relative=True),
                Prediction("tensor_pipe", "<=", 50),
            ),
            backends=("triton",),
            gap=_CUDA_GAP,
        ),
        Step(
            name="v03_grouped",
            change="Blocks are numbered so that neighbours share rows and columns of tiles.",
            why="Blocks that run at the same time touch a near-square patch of the output, so their operands are "
            "found in L2 instead of device memory.",
            predictions=(
                Prediction("dram_bytes", "<=", 0.8, relative=True),
                Prediction("time", "<=", 0.97, relative=True),
            ),
            backends=("triton",),
            gap=_CUDA_GAP,
        ),
        Step(
            name="v04_autotuned",
            change="Tile shape, warps and stages are searched; tiles come by tensor descriptors and blocks persist.",
            why="A tile of 128 x 256 keeps the tensor cores busy longer per byte fetched, and several stages hide the "
            "fetch behind the product, across the borders of tiles too.",
            predictions=(
                Prediction("time", "<=", 0.6, relative=True),
                Prediction("tensor_pipe", ">=", 70),
            ),
            backends=("triton",),
            gap=_CUDA_GAP,
        ),
    ),
)

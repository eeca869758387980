"""The sum of all elements, accumulated and returned in fp32: a read and an addition for each element."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel_twins.ops import baselines, ptx, vector_cases
from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor

_TREE_GAP = "tl.sum lays out the tree by itself: shuffles in a warp, shared memory between warps."
_CHUNK = 2**26  # elements converted to float64 at a time, so that the reference of a huge vector fits


def inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    from kernel_twins.ops.tensors import borders, normal

    x = normal(case, case.shape, generator)
    if case.get("values") == "hostile" and x.dim() == 1 and len(x):
        x[borders(len(x))] *= 16
        x += 0.25
        x[[0, -1]] = max(16.0, len(x) / 2**16)  # far more than the sum's rounding error
    return (x,)


def reference(case: Case, inputs: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, Tensor]:
    import torch

    (x,) = inputs
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    for chunk in x.flatten().split(_CHUNK):
        values = chunk.double()
        total += torch.stack([values.sum(), values.abs().sum()])
    return total[:1], total[1:]


def check(x: Tensor, *, out: Tensor) -> None:
    """x: contiguous, any shape, fp32, bf16 or fp16; out: fp32, no dimensions, on x's device."""
    from kernel_twins.ops import tensors

    tensors.require_dtype("x", x, *ITEMSIZE)
    tensors.require_contiguous("x", x)
    tensors.require_dtype("out", out, "fp32")
    tensors.require_device("out", out, "x", x)
    tensors.require_shape("out", out, (), "the sum of everything is one number")
    tensors.require_apart(out, "x", x)


def torch_sum(x: Tensor, *, out: Tensor) -> None:
    import torch

    torch.sum(x.flatten(), dim=0, dtype=torch.float32, out=out)


def _function(x: Tensor) -> Tensor:
    import torch

    return torch.sum(x, dtype=torch.float32)


OP = Op(
    name="reduction",
    family="reduction",
    chapter=2,
    title="Reduction",
    summary="The sum of a vector in fp32. One addition for every element read, and a result that all threads share.",
    inputs=inputs,
    hostile=True,
    outputs=lambda case: (Output((), "fp32"),),
    reference=reference,
    check=check,
    test_cases=vector_cases.test_cases(
        (1_003, {"values": "infs"}),
        (1_003, {"values": "nan"}),
        (1_003, {"values": "tail"}),
        (1_000_003, {"values": "tail"}),
        (1_003, {"values": "tail", "offset": "1"}),
    ),
    huge_cases=(Case.of(2**31 + 5, dtype="bf16"), Case.of(2**31 + 5, dtype="bf16", values="tail")),
    bench_cases=vector_cases.BENCH_CASES,
    headline_cases=tuple(Case.of(2**k, dtype="fp32") for k in (30, 28, 20, 18, 16)) + (Case.of(2**30, dtype="bf16"),),
    size_axis=vector_cases.SIZE_AXIS,
    profile_case=vector_cases.PROFILE_CASE,
    ceiling="dram_read",
    flops=lambda case: math.prod(case.shape),
    bytes=lambda case: math.prod(case.shape) * ITEMSIZE[case.dtype] + 4,
    baselines={"torch": torch_sum, "compile": baselines.compiled(_function), "cub": None},
    steps=(
        Step(
            name="v01_interleaved",
            predictions=(
                Prediction("dram_share", "<=", 35),
                Prediction("sectors_per_load", "==", 4, tolerance=0.05, backends=("cuda",)),
            ),
            launches=4,
        ),
        Step(
            name="v02_sequential",
            predictions=(
                Prediction("instructions", "<=", 0.75, relative=True),
                Prediction("time", "<=", 0.9, relative=True),
            ),
            launches=4,
            no_triton=_TREE_GAP,
        ),
        Step(
            name="v03_shuffle",
            predictions=(
                Prediction("instructions", "<=", 0.8, relative=True),
                Prediction("time", "<=", 0.85, relative=True),
                Prediction("dram_share", "<=", 55),
            ),
            launches=4,
            no_triton=_TREE_GAP,
        ),
        Step(
            name="v04_vectorized",
            predictions=(
                Prediction("time", "<=", 0.5, relative=True),
                Prediction("dram_share", ">=", 80),
                Prediction("sectors_per_load", "==", 16, tolerance=0.05),
            ),
            launches=3,
            promises={90: (ptx.LOAD_16_BYTES,)},
        ),
        Step(
            name="v05_grid_stride",
            predictions=(
                Prediction("time", "<=", 0.97, relative=True),
                Prediction("dram_share", ">=", 85),
                Prediction("instructions", "<=", 1.5, relative=True),
            ),
            launches=2,
            promises={90: (ptx.LOAD_16_BYTES,)},
        ),
        Step(
            name="v06_atomic",
            predictions=(Prediction("time", "<=", 0.995, relative=True),),
            launches=0,
            deterministic=False,
            helpers=("vectorized_elementwise_kernel",),  # PyTorch's, which clears Triton's result
            promises={90: (ptx.LOAD_16_BYTES, ptx.ATOMIC_ADD)},
        ),
        Step(
            name="v07_last_block",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.015),
                Prediction("dram_share", ">=", 86),
            ),
            promises={90: (ptx.LOAD_16_BYTES, ptx.TICKET, ptx.LOAD_FROM_L2)},
        ),
        Step(
            name="v08_polling",
            predictions=(Prediction("time", "==", 1.0, relative=True, tolerance=0.01),),
            no_triton="Triton promises no progress to a program that waits for another one's store.",
        ),
    ),
)

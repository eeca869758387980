"""The sum of all elements, accumulated and returned in fp32: one read an element, one addition."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor

_CHUNK = 2**26  # elements converted to float64 at a time, so that the reference of a huge vector fits


def inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    from kernel_twins.tensors import normal

    return (normal(case, case.shape, generator),)


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
    from kernel_twins.tensors import require_apart, require_contiguous, require_device, require_dtype, require_shape

    require_dtype("x", x, *ITEMSIZE)
    require_contiguous("x", x)
    require_dtype("out", out, "fp32")
    require_device("out", out, "x", x)
    require_shape("out", out, (), "the sum of everything is one number")
    require_apart(out, "x", x)


def torch_sum(x: Tensor, *, out: Tensor) -> None:
    import torch

    torch.sum(x.flatten(), dim=0, dtype=torch.float32, out=out)


OP = Op(
    name="reduction",
    chapter=2,
    title="Reduction",
    summary="The sum of a vector in fp32. One addition for every element read, and a result that all threads share.",
    inputs=inputs,
    outputs=lambda case: (Output((), "fp32"),),
    reference=reference,
    check=check,
    accepts=lambda case: "",
    test_cases=(
        *(
            Case.of(n, dtype=dtype, **variant)
            for dtype in ("fp32", "bf16", "fp16")
            for n, variant in (
                (0, {}),
                (1, {}),
                (127, {}),
                (1_000, {}),
                (4_096, {}),
                (65_537, {}),
                (1_000_003, {}),
                (1_003, {"offset": "1"}),
                (262_144, {"offset": "1"}),
                (1_003, {"values": "inf"}),
                (1_003, {"values": "infs"}),
                (1_003, {"values": "nan"}),
                (1_003, {"values": "tail"}),
                (1_000_003, {"values": "tail"}),
                (1_003, {"values": "tail", "offset": "1"}),
            )
        ),
        Case.of(17, 33, dtype="fp32"),
        Case.of(0, 5, dtype="bf16"),
    ),
    huge_cases=(Case.of(2**31 + 5, dtype="bf16"), Case.of(2**31 + 5, dtype="bf16", values="tail")),
    bench_cases=tuple(
        Case.of(2**k, dtype=dtype) for dtype in ("fp32", "bf16") for k in (30, 28, 26, 24, 22, 20, 18, 16)
    ),
    profile_case=Case.of(2**26, dtype="fp32"),
    ceiling="dram_read",
    flops=lambda case: math.prod(case.shape),
    bytes=lambda case: math.prod(case.shape) * ITEMSIZE[case.dtype] + 4,
    baselines={"torch": torch_sum, "cub": None},
    steps=(
        Step(
            name="v01_interleaved",
            change="Each block sums its elements by a tree whose active threads are picked with a modulo.",
            why="The textbook's first step. Active threads are scattered over all warps, so every warp executes "
            "every level for a shrinking number of lanes, and a barrier follows each: the memory waits.",
            predictions=(
                Prediction("dram_share", "<=", 35),
                Prediction("sectors_per_load", "==", 4, tolerance=0.05, backends=("cuda",)),
            ),
            launches=4,
        ),
        Step(
            name="v02_grid_stride",
            change="A few blocks an SM stride over the vector with wide loads, adding in registers.",
            why="All but the last few thousand additions happen in registers, without a barrier, while several "
            "16-byte loads are in flight; the tree is climbed once a block, by warp shuffles.",
            predictions=(
                Prediction("time", "<=", 0.3, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.95, relative=True, backends=("triton",)),
                Prediction("dram_share", ">=", 85),
                Prediction("sectors_per_load", "==", 16, tolerance=0.05),
            ),
            launches=2,
        ),
    ),
)

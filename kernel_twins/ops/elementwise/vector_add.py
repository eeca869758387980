"""``out = a + b``, element by element: two reads, one addition and one write. Memory is the only limit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel_twins.ops import baselines, ptx, vector_cases
from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor


def inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    from kernel_twins.ops.tensors import normal

    return normal(case, case.shape, generator), normal(case, case.shape, generator)


def reference(case: Case, inputs: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, Tensor]:
    a, b = (tensor[rows].double() for tensor in inputs)
    return a + b, a.abs() + b.abs()


def check(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """a, b, out: contiguous, one shape, fp32, bf16 or fp16 alike, on one device."""
    from kernel_twins.ops import tensors

    tensors.require_dtype("a", a, *ITEMSIZE)
    tensors.require_contiguous("a", a)
    for name, tensor in (("b", b), ("out", out)):
        tensors.require_dtype(name, tensor, *ITEMSIZE)
        tensors.require_same_dtype(name, tensor, "a", a)
        tensors.require_device(name, tensor, "a", a)
        tensors.require_shape(name, tensor, tuple(a.shape), "a, b and out are not broadcast")
        tensors.require_contiguous(name, tensor)
    for name, tensor in (("a", a), ("b", b)):
        if out.data_ptr() != tensor.data_ptr():  # the same tensor may be out, an overlapping one may not
            tensors.require_apart(out, name, tensor)


def torch_add(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    import torch

    torch.add(a, b, out=out)


def _function(a: Tensor, b: Tensor) -> Tensor:
    return a + b


OP = Op(
    name="vector_add",
    family="elementwise",
    chapter=1,
    title="Vector add",
    summary="`out = a + b`. One addition for every three memory accesses: the whole ladder is about moving bytes.",
    inputs=inputs,
    outputs=lambda case: (Output(case.shape, case.dtype),),
    reference=reference,
    check=check,
    test_cases=vector_cases.test_cases((1_003, {"values": "nan"})),
    huge_cases=(Case.of(2**31 + 5, dtype="bf16"), Case.of(2**31 + 5, dtype="bf16", offset="1")),
    bench_cases=vector_cases.BENCH_CASES,
    headline_cases=(
        Case.of(2**30, dtype="fp32"),
        Case.of(2**24, dtype="fp32"),
        Case.of(2**30, dtype="bf16"),
    ),
    size_axis=vector_cases.SIZE_AXIS,
    profile_case=vector_cases.PROFILE_CASE,
    ceiling="dram_copy",
    flops=lambda case: math.prod(case.shape),
    bytes=lambda case: 3 * math.prod(case.shape) * ITEMSIZE[case.dtype],
    baselines={"torch": torch_add, "compile": baselines.compiled(_function), "cub": None},
    steps=(
        Step(
            name="v01_scalar",
            predictions=(
                Prediction("sectors_per_load", "==", 4, tolerance=0.01),
                Prediction("dram_share", ">=", 80),
                Prediction("bytes_over_minimum", "==", 1, tolerance=0.05),
            ),
        ),
        Step(
            name="v02_grid_stride",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.04),
                Prediction("sectors_per_load", "==", 4, tolerance=0.01),
            ),
        ),
        Step(
            name="v03_vectorized",
            predictions=(
                Prediction("sectors_per_load", "==", 16, tolerance=0.01),
                Prediction("instructions", "<=", 0.45, relative=True),
                Prediction("time", "<=", 0.98, relative=True),
            ),
            promises={80: (ptx.LOAD_16_BYTES,), 90: (ptx.LOAD_16_BYTES,)},
        ),
        Step(
            name="v04_streaming",
            predictions=(
                Prediction("time", "<=", 0.99, relative=True),
                Prediction("dram_share", ">=", 90),
            ),
            promises={90: (ptx.LOAD_16_BYTES_ONCE,)},
        ),
        Step(
            name="v05_bulk_ring",
            predictions=(
                Prediction("load_requests", "<=", 0.05, relative=True),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
            ),
            arch=">=9.0",
            promises={90: (ptx.TMA_LOAD,)},
        ),
        Step(
            name="v06_bulk_tile",
            predictions=(
                Prediction("time", "<=", 0.97, relative=True),
                Prediction("dram_share", ">=", 91),
            ),
            arch=">=9.0",
            promises={90: (ptx.TMA_LOAD,)},
        ),
    ),
)

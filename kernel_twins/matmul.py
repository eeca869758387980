"""What all products ``out = a @ b`` have in common: their inputs, reference, checks, cases and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernel_twins.spec import ITEMSIZE, Case, Output

if TYPE_CHECKING:
    from torch import Generator, Tensor


def inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """a: [M, K] and b: [K, N], row-major, or b column-major where the case says ``b.col``."""
    from kernel_twins.tensors import normal

    m, n, k = case.shape
    a = normal(case, (m, k), generator)
    b = normal(case, (n, k), generator).t() if case.get("b") == "col" else normal(case, (k, n), generator)
    return a, b


def outputs(case: Case) -> tuple[Output, ...]:
    return (Output((case.shape[0], case.shape[1]), case.dtype),)


def reference(case: Case, inputs: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, Tensor]:
    a, b = inputs[0][rows].double(), inputs[1].double()
    return a @ b, a.abs() @ b.abs()


def check_of(*dtypes: str) -> Callable[..., None]:
    """An op's ``check`` for operands that are all of one of the dtypes."""

    def check(a: Tensor, b: Tensor, *, out: Tensor) -> None:
        """a: [M, K], b: [K, N], any strides; out: [M, N], contiguous; of one dtype, on one device."""
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
            require_dtype(name, tensor, *dtypes)
            require_same_dtype(name, tensor, "a", a)
            require_rank(name, tensor, 2)
            require_device(name, tensor, "a", a)
        require_shape("b", b, (a.shape[1], b.shape[1]), "its rows are a's columns")
        require_shape("out", out, (a.shape[0], b.shape[1]), "a's rows by b's columns")
        require_contiguous("out", out)
        require_apart(out, "a", a)
        require_apart(out, "b", b)

    return check


def accepts_of(*dtypes: str) -> Callable[[Case], str]:
    """An op's ``accepts`` for the same."""
    return lambda case: "" if case.dtype in dtypes else f"dtype is {case.dtype}, must be {' or '.join(dtypes)}"


def test_cases(*dtypes: str) -> tuple[Case, ...]:
    """Empty, one element, ragged on every side, unaligned, column-major, infinite and NaN."""
    return tuple(
        Case.of(m, n, k, dtype=dtype, **variant)
        for dtype in dtypes
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
            (256, 256, 256, {}),
            (256, 256, 256, {"b": "col"}),
            (136, 264, 72, {}),
            (136, 264, 72, {"b": "col"}),
            (300, 200, 1_000, {}),
            (65, 66, 67, {"offset": "1"}),
            (64, 64, 64, {"values": "inf"}),
            (64, 64, 64, {"values": "nan"}),
            (65, 33, 17, {"values": "inf", "b": "col"}),
        )
    )


# Both fp32 ladders are timed on the same products, so that they compare.
FP32_HEADLINE_CASES = tuple(
    Case.of(m, n, k, dtype="fp32") for m, n, k in ((4_096, 4_096, 4_096), (8_192, 8_192, 8_192), (3_333, 5_555, 7_777))
)
FP32_BENCH_CASES = (
    Case.of(1_024, 1_024, 1_024, dtype="fp32"),
    Case.of(2_048, 2_048, 2_048, dtype="fp32"),
    *FP32_HEADLINE_CASES,
)


def flops(case: Case) -> int:
    m, n, k = case.shape
    return 2 * m * n * k


def bytes_moved(case: Case) -> int:
    """Both operands read once, the result written once."""
    m, n, k = case.shape
    return ITEMSIZE[case.dtype] * (m * k + k * n + m * n)


def torch_mm_fp32(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """PyTorch's product in true fp32; RuntimeError where TF32 has been allowed."""
    import torch

    if torch.backends.cuda.matmul.allow_tf32:
        raise RuntimeError(
            "allow_tf32 is on; this baseline is true fp32: torch.set_float32_matmul_precision('highest')"
        )
    torch.mm(a, b, out=out)

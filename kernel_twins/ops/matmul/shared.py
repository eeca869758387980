"""Inputs, reference, checks, cases and costs of all products ``out = a @ b``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernel_twins.spec import ITEMSIZE, Case, Output, SizeAxis

if TYPE_CHECKING:
    from torch import Generator, Tensor


def inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """a: [M, K] and b: [K, N], row-major by default.

    ``a.col`` and ``b.col`` make them column-major, ``a.expanded`` and ``b.expanded`` one row that a stride of 0
    repeats. With ``pitch``, rows (or columns) lie that many elements further apart than they must.
    """
    m, n, k = case.shape
    a, b = _matrix(case, "a", m, k, generator), _matrix(case, "b", k, n, generator)
    if case.get("values") == "hostile":
        weigh(a, b)
    return a, b


def weigh(a: Tensor, b: Tensor) -> None:
    """Hostile a and b: the last 8 elements along K weigh as much as a thousand others, and sums have a mean."""
    for each in (a[:, -8:], b[-8:]):
        each *= 4
    a += 0.25
    b += 0.25


def _matrix(case: Case, name: str, rows: int, cols: int, generator: Generator) -> Tensor:
    from kernel_twins.ops.tensors import normal

    pitch, layout = int(case.get("pitch", "0")), case.get(name)
    if layout == "col":
        return normal(case, (cols, rows + pitch), generator)[:, :rows].t()
    if layout == "expanded":
        return normal(case, (1, cols), generator).expand(rows, cols)
    return normal(case, (rows, cols + pitch), generator)[:, :cols]


def outputs(case: Case) -> tuple[Output, ...]:
    """One output, of the inputs' dtype or of the one that ``out`` names."""
    return (Output((case.shape[0], case.shape[1]), _out_dtype(case)),)


def _out_dtype(case: Case) -> str:
    return case.get("out", case.dtype)


def reference(case: Case, inputs: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, Tensor]:
    from kernel_twins.ops.tensors import chain

    a, b = inputs[0][rows].double(), inputs[1].double()
    product = a @ b
    return product, a.abs() @ b.abs() + chain(a.shape[1]) * product.abs()


def check_of(*dtypes: str) -> Callable[..., None]:
    """An op's ``check``: a and b share one of the dtypes."""

    def check(a: Tensor, b: Tensor, *, out: Tensor) -> None:
        """a: [M, K], b: [K, N], any strides; out: [M, N], contiguous, of a's dtype or fp32; all on one device."""
        from kernel_twins.ops import tensors

        tensors.require_dtype("a", a, *dtypes)
        tensors.require_rank("a", a, 2)
        tensors.require_dtype("b", b, *dtypes)
        tensors.require_same_dtype("b", b, "a", a)
        tensors.require_rank("b", b, 2)
        tensors.require_device("b", b, "a", a)
        tensors.require_dtype("out", out, *dict.fromkeys((tensors.name_of(a.dtype), "fp32")))
        tensors.require_rank("out", out, 2)
        tensors.require_device("out", out, "a", a)
        tensors.require_shape("b", b, (a.shape[1], b.shape[1]), "its rows are a's columns")
        tensors.require_shape("out", out, (a.shape[0], b.shape[1]), "a's rows by b's columns")
        tensors.require_contiguous("out", out)
        tensors.require_apart(out, "a", a)
        tensors.require_apart(out, "b", b)

    return check


def accepts_of(*dtypes: str) -> Callable[[Case], str]:
    """An op's ``accepts``: the case has one of the dtypes."""

    def accepts(case: Case) -> str:
        if case.dtype not in dtypes:
            return f"dtype is {case.dtype}, must be {' or '.join(dtypes)}"
        outs = dict.fromkeys((case.dtype, "fp32"))
        return "" if _out_dtype(case) in outs else f"out is {_out_dtype(case)}, must be {' or '.join(outs)}"

    return accepts


def copyable(case: Case) -> str:
    """Why the tensor memory accelerator cannot copy a or b of a case; an empty string if it can copy both.

    It needs contiguous rows or columns that start at multiples of 16 bytes.
    """
    m, n, k = case.shape
    if 0 in case.shape:
        return ""  # nothing is copied
    if int(case.get("offset", "0")) * ITEMSIZE[case.dtype] % 16:
        return f"a starts {case.get('offset')} elements behind a multiple of 16 bytes"
    pitch = int(case.get("pitch", "0"))
    a = 0 if case.get("a") == "expanded" else (m if case.get("a") == "col" else k) + pitch
    b = 0 if case.get("b") == "expanded" else (k if case.get("b") == "col" else n) + pitch
    return _apart("a", a, case.dtype) or _apart("b", b, case.dtype)


def copyable_with_out(case: Case) -> str:
    """The same for a, b and out, for steps whose stores use it, too. out has the same offset as a."""
    return copyable(case) or ("" if 0 in case.shape else _apart("out", case.shape[1], _out_dtype(case)))


def _apart(name: str, elements: int, dtype: str) -> str:
    multiple = 16 // ITEMSIZE[dtype]
    if elements and elements % multiple == 0:
        return ""
    lines = "rows" if name == "out" else "rows or columns"
    return f"{lines} of {name} are {elements} elements apart, must be a multiple of {multiple}"


def test_cases(*dtypes: str) -> tuple[Case, ...]:
    """Test cases: empty, one element, ragged on every side, unaligned, in other layouts, infinite and NaN."""
    return tuple(
        Case.of(m, n, k, dtype=dtype, **variant)
        for dtype in dtypes
        for m, n, k, variant in (
            (0, 5, 7, {}),
            (5, 0, 7, {}),
            (5, 7, 0, {}),
            (0, 8, 16, {}),
            (8, 16, 0, {}),
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
            (135, 264, 72, {}),
            (136, 264, 67, {}),
            (136, 263, 72, {"b": "col"}),
            (136, 264, 72, {"a": "col"}),
            (136, 264, 72, {"a": "col", "b": "col"}),
            (129, 127, 65, {"a": "col", "b": "col"}),
            (136, 264, 72, {"pitch": "1"}),
            (136, 264, 72, {"pitch": "8"}),
            (136, 264, 72, {"pitch": "1", "a": "col", "b": "col"}),
            (67, 45, 65, {"pitch": "8", "b": "col"}),
            (136, 264, 72, {"a": "expanded"}),
            (136, 264, 72, {"b": "expanded"}),
            (300, 200, 1_000, {}),
            (65, 66, 67, {"offset": "1"}),
            (64, 64, 64, {"values": "inf"}),
            (64, 64, 64, {"values": "nan"}),
            (65, 33, 17, {"values": "inf", "b": "col"}),
        )
    )


def fp32_out_test_cases(*dtypes: str) -> tuple[Case, ...]:
    """Test cases with an fp32 ``out``: rows of odd length, and rows that start at no multiple of 16 bytes."""
    return tuple(
        Case.of(m, n, k, dtype=dtype, out="fp32", **variant)
        for dtype in dtypes
        for m, n, k, variant in (
            (0, 5, 7, {}),
            (5, 7, 0, {}),
            (1, 1, 1, {}),
            (129, 127, 65, {}),
            (256, 256, 256, {}),
            (136, 264, 72, {"b": "col"}),
            (136, 262, 72, {"a": "col", "b": "col"}),
            (136, 263, 72, {"b": "col"}),
            (300, 200, 1_000, {}),
            (65, 66, 67, {"offset": "1"}),
            (64, 64, 64, {"values": "inf"}),
        )
    )


SQUARES = SizeAxis("M = N = K", lambda case: case.shape[0], lambda case: "" if len(set(case.shape)) == 1 else None)


def flops(case: Case) -> int:
    m, n, k = case.shape
    return 2 * m * n * k


def bytes_moved(case: Case) -> int:
    """Both operands read once, the result written once."""
    m, n, k = case.shape
    return ITEMSIZE[case.dtype] * (m * k + k * n) + ITEMSIZE[_out_dtype(case)] * m * n


def allows_tf32() -> bool:
    """Whether PyTorch may compute fp32 products by TF32. After the newer setting is used, the older one raises."""
    import torch

    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")

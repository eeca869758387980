"""What the specs of operations along a matrix's rows share: inputs, checks and the library they are compared with."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kernel_twins.spec import ITEMSIZE, Case

if TYPE_CHECKING:
    from torch import Generator, Tensor

ELEMENTS = 2**28
"""In the bandwidth cases: 512 MiB of bf16 a tensor, ten times the L2 cache."""

LENGTHS = (256, 1_024, 4_096, 5_003, 12_288, 16_384, 50_257, 65_536, 262_144)
"""N of the bandwidth cases, two of them odd."""

_OUTLIER_EVERY, _OUTLIER = 1_000, 100.0


def matrix(case: Case, generator: Generator, layout: str = "") -> Tensor:
    """[M, N] standard normal values of the case's dtype.

    ``layout`` is empty for a contiguous matrix, ``pitched`` for rows that lie N + 3 elements apart (so that they start
    at every alignment), or ``expanded`` for one row seen M times. ``values`` in the variant: what tensors.normal knows;
    ``outliers`` makes every thousandth value 100 times as wide; ``masked`` makes the first row and the second half of
    the others minus infinity.
    """
    from kernel_twins.tensors import normal

    m, n = case.shape
    if layout == "pitched":
        x = normal(case, (m, n + 3), generator)[:, :n]
    elif layout == "expanded":
        x = normal(case, (1, n), generator).expand(m, n)
    else:
        x = normal(case, (m, n), generator)
    if case.get("values") == "outliers":
        x.view(-1)[::_OUTLIER_EVERY] *= _OUTLIER
    if case.get("values") == "masked":
        x[:1] = x[1:, n // 2 :] = -float("inf")
    return x


def require_rows(name: str, tensor: Tensor) -> None:
    """[M, N] of fp32, bf16 or fp16, whose rows are contiguous and lie at any distance."""
    from kernel_twins.tensors import require_dtype, require_rank

    require_dtype(name, tensor, *ITEMSIZE)
    require_rank(name, tensor, 2)
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, must have contiguous rows: call {name}.contiguous()")


def compiled(function: Callable[..., Tensor]) -> Callable[..., None]:
    """``call(*inputs, **options, out=tensor)`` of what torch.compile makes of a function; it writes ``out`` itself."""

    @functools.cache
    def build() -> Callable[..., None]:
        import torch

        def into(*inputs: Tensor, out: Tensor, **options: Any) -> None:
            out.copy_(function(*inputs, **options))

        return torch.compile(into, dynamic=False)

    def call(*inputs: Tensor, out: Tensor, **options: Any) -> None:
        import torch

        from kernel_twins import environment

        # By default it gives up after eight shapes, and runs the rest as it finds it.
        with torch._dynamo.config.patch(recompile_limit=256), environment.kept():
            build()(*inputs, out=out, **options)

    return call


def test_cases(name: str, option: Mapping[str, str]) -> tuple[Case, ...]:
    """Rows of every length that a step may treat in its own way, every layout of the input of that name, odd values."""
    return tuple(
        Case.of(m, n, dtype=dtype, **variant)
        for dtype in ITEMSIZE
        for m, n, variant in (
            (0, 5, {}),
            (5, 0, {}),
            (1, 1, {}),
            (3, 2, {}),
            (300, 7, {}),
            *((67, n, {}) for n in (31, 256, 257, 1_000, 1_024)),
            (37, 4_099, {}),
            (5, 12_288, {}),
            (5, 16_387, {}),
            (3, 50_257, {}),
            (3, 65_536, {}),
            (2, 131_072, {}),
            (2, 262_147, {}),
            (1, 2**20, {}),
            *((19, n, {name: layout}) for n in (40, 1_027, 8_192) for layout in ("pitched", "expanded")),
            (9, 33, {"offset": "1"}),
            (9, 5_003, {"offset": "1"}),
            (9, 65_536, {"offset": "1"}),
            *((9, n, {"values": "outliers"}) for n in (1_000, 5_003, 70_000)),
            *((9, n, {"values": "masked"}) for n in (64, 2_048, 70_000)),
            *((5, 1_003, {"values": values}) for values in ("inf", "infs", "nan")),
            *((9, n, option) for n in (200, 5_003, 70_000)),
            (9, 2_048, {**option, "values": "masked"}),
            (9, 1_003, {**option, "values": "outliers"}),
        )
    )


def at_most(n: int, who: str) -> Callable[[Case], str]:
    """A step's ``accepts``: rows of up to n elements."""
    return lambda case: "" if case.shape[1] <= n else f"rows have {case.shape[1]} elements, {who} {n}"


def fits(size: int, who: str) -> Callable[[Case], str]:
    """A step's ``accepts``: rows of up to that many bytes."""

    def accepts(case: Case) -> str:
        row = case.shape[1] * ITEMSIZE[case.dtype]
        return "" if row <= size else f"rows have {row} bytes, {who} {size}"

    return accepts


@functools.cache
def liger(op: str, n: int) -> tuple[Any, dict[str, int]]:
    """Liger's module of kernels, and the settings that it launches them with for rows of n elements.

    UnavailableError where liger-kernel is not installed, or does not take such rows.
    """
    from kernel_twins._load import UnavailableError

    if n == 0:
        raise UnavailableError("liger-kernel takes no rows without elements")
    try:
        module = importlib.import_module(f"liger_kernel.ops.{op}")
        utils = importlib.import_module("liger_kernel.ops.utils")
    except ImportError as error:
        raise UnavailableError("liger-kernel is not installed: pip install liger-kernel") from error
    try:
        block_size, num_warps = utils.calculate_settings(n)
    except RuntimeError as error:
        raise UnavailableError(f"liger-kernel takes no rows of {n} elements") from error
    return module, {"BLOCK_SIZE": block_size, "num_warps": num_warps}

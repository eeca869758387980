"""``dx`` and ``dbias`` of dropout_add: the mask is drawn again, from the seed and the offset of the forward pass."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING

from kernel_twins.ops import baselines, in_parts, row_cases
from kernel_twins.ops.dropout import shared
from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Generator, Tensor

_MOST_MASKS = 64


def _has_bias(case: Case) -> bool:
    return case.get("bias") == "yes"


def _inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """dout, with the case's layout and values; with an activation also x and the bias, at which its slope is taken.

    Where hostile, dout has a mean other than 0, and rows at borders (tensors.borders) weigh most in a column's sum.
    """
    from kernel_twins.ops.tensors import borders

    dout = row_cases.matrix(case, generator, case.get("dout"))
    if case.get("values") == "hostile":
        dout[borders(case.shape[0])] *= 4
        dout += 0.25
    if case.get("act", "none") == "none":
        return (dout,)
    plain = case.but(values="")
    return dout, row_cases.matrix(plain, generator, case.get("x")), *shared.bias(case, generator)


def _outputs(case: Case) -> tuple[Output, ...]:
    dx = Output(case.shape, case.dtype)
    return (dx, Output(case.shape[1:], case.dtype)) if _has_bias(case) else (dx,)


def _dx(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    """No activation's second derivative exceeds 1, so an error of x + bias moves the slope by no more than itself."""
    import torch

    from kernel_twins.ops.activations import slope as slope_of

    dout, x, bias = shared.operands(inputs)
    options = shared.options(case)
    p, activation = options["p"], options.pop("activation")
    dx = dout[part].double() * shared.scale(p)
    terms = dx.abs()
    if x is not None:
        z, size = x[part].double(), x[part].double().abs()
        if bias is not None:
            z, size = z + bias.double(), size + bias.double().abs()
        slope = slope_of(z, activation)
        # Where relu's slope is 0, dx is 0 even if the gradient is infinite.
        dx = torch.where(slope == 0, torch.zeros_like(dx), dx * slope) if activation == "relu" else dx * slope
        terms = terms * (1.13 + size)
    kept = shared.kept(case.shape, part, dout.device, **options)
    return torch.where(kept, dx, 0.0), torch.where(kept, terms, 0.0)


def _dbias(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    """``part`` is a slice of the columns."""
    dbias, terms = in_parts.over_columns(inputs[0], slice(None), lambda rows: _dx(case, inputs, rows))
    return dbias[part], terms[part]


def _check(
    dout: Tensor,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out: Tensor | tuple[Tensor, ...],
    p: float = shared.P,
    activation: str = "none",
    seed: int = 0,
    offset: int = 0,
) -> None:
    """dout, x: [M, N], contiguous rows at any distance, fp32, bf16 or fp16 alike; bias: [N].

    The slope is taken at x + bias; without an activation neither is given. out: dx, or dx and dbias; [M, N] and [N],
    contiguous.
    """
    from kernel_twins.ops import row_checks

    row_checks.require_rows("dout", dout)
    row_checks.require_matrix("x", x, "dout", dout)
    row_checks.require_vector("bias", bias, "dout", dout)
    shared.check_options(p, activation, seed, offset)
    if activation == "none" and (x is not None or bias is not None):
        raise ValueError("activation is 'none', which has no use for x and bias: leave them out")
    if activation != "none" and x is None:
        raise ValueError(f"x is missing, must be there: the slope of '{activation}' is taken at x + bias")
    row_checks.require_out(out, ["dx", "dbias"] if isinstance(out, tuple) else ["dx"], "dout", dout)
    row_checks.require_all_apart(out, {"dout": dout, "x": x, "bias": bias})


def _chain(
    dout: Tensor, x: Tensor | None, bias: Tensor | None, kept: Tensor, p: float, activation: str, summed: bool
) -> tuple[Tensor, ...]:
    """The operations of PyTorch's autograd, given the mask that its forward pass has stored.

    PyTorch has stored x + bias, too; here it is computed again if there is a bias.
    """
    import torch

    from kernel_twins.ops.activations import dz

    dx = torch.ops.aten.native_dropout_backward(dout, kept, shared.scale(p))
    if x is not None:
        dx = dz(dx, x if bias is None else x + bias, activation)
    return (dx, dx.sum(dim=0)) if summed else (dx,)


@functools.lru_cache(maxsize=1)
def _pytorchs_masks(shape: tuple[int, ...], p: float, device: torch.device) -> Iterator[Tensor]:
    """Masks in rotation, as PyTorch's forward passes would have stored them: three times L2's size, or 64 small ones.

    All are made in advance: made within a call, they would be captured into its graph.
    """
    import torch

    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1
    count = min(_MOST_MASKS, math.ceil(3 * l2_bytes / max(1, math.prod(shape))))
    return itertools.cycle([torch.rand(shape, device=device) >= p for _ in range(count)])


def _with_pytorchs_mask(chain: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A baseline that reads such a mask."""

    def call(
        *inputs: Tensor, out: Tensor | tuple[Tensor, ...], p: float = shared.P, activation: str = "none", **_: int
    ) -> tuple[Tensor, ...]:
        dout, x, bias = shared.operands(inputs)
        mask = next(_pytorchs_masks(tuple(dout.shape), p, dout.device))
        return chain(dout, x, bias, mask, p, activation, isinstance(out, tuple))

    return call


_compiled = functools.partial(baselines.compiled_results(_chain), out=None)


def _exemplar(
    *inputs: Tensor,
    out: Tensor | tuple[Tensor, ...],
    p: float = shared.P,
    activation: str = "none",
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, ...]:
    """The same operations with the mask of the seed and the offset."""
    dout, x, bias = shared.operands(inputs)
    mask = shared.kept(tuple(dout.shape), slice(0, dout.shape[0]), dout.device, p=p, seed=seed, offset=offset)
    dx, *sums = _chain(dout, x, bias, mask, p, activation, isinstance(out, tuple))
    # PyTorch multiplies by the mask, so an infinity becomes NaN; here a dropped element's gradient is 0.
    return dx.masked_fill_(~mask, 0), *sums


def _bytes(case: Case) -> int:
    """dout, dx and, with an activation, x. Vectors are left out as negligible."""
    return (2 if case.get("act", "none") == "none" else 3) * math.prod(case.shape) * ITEMSIZE[case.dtype]


_BIAS = {"bias": "yes"}
_PROFILE_CASE = row_cases.bandwidth_case(4_096, p="10", **_BIAS)
_PLAIN = row_cases.bandwidth_case(4_096, p="10")
_GELU = row_cases.bandwidth_case(4_096, p="10", act="gelu")
_ODD = row_cases.bandwidth_case(5_003, p="10", **_BIAS)
_SMALL = Case.of(4_096, 1_024, dtype="bf16", p="10", **_BIAS)
_FEW = Case.of(32, 8_388_611, dtype="bf16", p="10", **_BIAS)

# So many rows that each block of a GPU adds several of them to its part of dbias.
_MANY_ROWS = ((2_000, 257), (1_400, 654), (1_500, 1_024), (100, 5_003), (3_000, 9), (5_000, 3))

OP = Op(
    name="dropout_add_backward",
    family="dropout",
    chapter=16,
    title="Dropout and residual, backward",
    summary="`dx = dout * mask / (1 - p) * activation'(x + bias)` and `dbias = sum(dx)` over the columns: the mask is "
    "computed a second time, which is cheaper than to have stored it.",
    inputs=_inputs,
    hostile=True,
    outputs=_outputs,
    reference=_dx,
    more_references=(_dbias,),
    check=_check,
    options=shared.options,
    test_cases=row_cases.test_cases(
        "dout",
        *row_cases.option_cases(_BIAS),
        *(
            (9, n, {**bias, "act": act})
            for act in shared.ACTIVATIONS[1:]
            for n in (1_000, 1_003)
            for bias in ({}, _BIAS)
        ),
        *((33, n, {**_BIAS, "p": p}) for p in ("0", "1", "10", "99", "100") for n in (264, 257)),
        *((33, n, {**_BIAS, "act": "gelu", "seed": "large"}) for n in (264, 257)),
        *((19, n, {**_BIAS, "act": "silu", "dout": "pitched"}) for n in (40, 1_027)),
        *((19, n, {**_BIAS, "act": "silu", "x": layout}) for n in (40, 1_027) for layout in ("pitched", "expanded")),
        *((9, n, {**_BIAS, "act": "gelu", "offset": "1"}) for n in (8, 5_003)),
        # Many rows of several skews, which end between packs of dx and within them.
        *((1_001, n, {**bias, "act": "gelu_tanh", "x": "pitched"}) for n in (9, 64, 131) for bias in ({}, _BIAS)),
        *((1_001, n, {**bias, "dout": "pitched"}) for n in (8, 67) for bias in ({}, _BIAS)),
        *((m, n, {**_BIAS, "act": "relu"}) for m, n in _MANY_ROWS),
        # Few rows, each of which fills the GPU, at the same skew and at several.
        *((2, n, _BIAS) for n in (280_000, 280_003)),
        (3, 280_003, {**_BIAS, "act": "silu", "x": "pitched"}),
        (3, 280_000, {**_BIAS, "act": "gelu", "dout": "pitched"}),
        (3, 280_003, {**_BIAS, "act": "relu", "dout": "expanded", "offset": "1"}),
        # Few rows of several skews, more of them than groups of threads, that start alike and differently.
        *((m, n, {**_BIAS, "act": act}) for m, n in ((9, 70_003), (17, 70_006)) for act in ("none", "gelu")),
        (9, 70_003, {**_BIAS, "act": "silu", "dout": "pitched", "x": "pitched"}),
        (9, 70_001, {**_BIAS, "dout": "expanded"}),
        (1, 600_003, {**_BIAS, "act": "relu"}),
        (0, 5, _BIAS),
        (5, 0, _BIAS),
    ),
    huge_cases=(Case.of(2**21 + 3, 1_025, dtype="bf16", **_BIAS),),
    bench_cases=(
        _PROFILE_CASE,
        _PLAIN,
        _GELU,
        row_cases.bandwidth_case(1_024, p="10", **_BIAS),
        _ODD,
        row_cases.bandwidth_case(4_096, "fp32", p="10", **_BIAS),
        _SMALL,
        _FEW,
    ),
    headline_cases=(_PROFILE_CASE, _PLAIN, _GELU),
    size_axis=row_cases.SIZE_AXIS,
    profile_case=_PROFILE_CASE,
    ceiling="dram_copy",
    flops=lambda case: (2 + _has_bias(case)) * math.prod(case.shape),  # a product, a choice, and a sum
    bytes=_bytes,
    baselines={"torch": _with_pytorchs_mask(_chain), "compile": _with_pytorchs_mask(_compiled)},
    exemplar=_exemplar,
    settled=shared.settled,
    behind={"cuda": ("v05_dispatch",), "triton": ("v05_dispatch", "v02_persistent")},
    steps=(
        Step(
            name="v01_rows_then_columns",
            predictions=(
                Prediction("bytes_over_minimum", "==", 1.5, tolerance=0.1, backends=("cuda",)),
                Prediction("bytes_over_minimum", "<=", 1.8, backends=("triton",)),
                Prediction("dram_share", "<=", 70),
            ),
            launches=3,
            helpers=("norm_backward_sum_kernel",),
        ),
        Step(
            name="v02_persistent",
            predictions=(
                Prediction("bytes_over_minimum", "==", 1.0, tolerance=0.05),
                Prediction("time", "<=", 0.6, relative=True),
                Prediction("dram_share", ">=", 85, backends=("cuda",)),
                Prediction("dram_share", ">=", 80, backends=("triton",)),
                Prediction("time", "<=", 620, case=_GELU),
                Prediction("time", "<=", 14, case=_SMALL),
            ),
            launches=2,
            helpers=("norm_backward_sum_kernel",),
        ),
        Step(
            name="v03_rows_ahead",
            predictions=(
                Prediction("time", "<=", 0.95, relative=True),
                Prediction("dram_share", ">=", 88),
                Prediction("time", "<=", 370, case=_PLAIN),
                Prediction("time", "<=", 600, case=_GELU),
            ),
            launches=2,
            no_triton="A Triton program has as many loads under way as its block has packs for a thread: v02 has "
            "several.",
        ),
        Step(
            name="v04_rows_abreast",
            predictions=(
                Prediction("dram_share", ">=", 85),
                Prediction("time", "<=", 385),
                Prediction("time", "<=", 375, case=_PLAIN),
                Prediction("time", "<=", 567, case=_GELU),
                Prediction("time", "<=", 420, case=_ODD),
                Prediction("time", "<=", 13, case=_SMALL),
            ),
            launches=2,
            no_triton="Triton has 16 bytes an access only where it knows that all rows begin at multiples of that.",
        ),
        Step(
            name="v05_dispatch",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.01, backends=("cuda",)),
                Prediction("time", "<=", 1.05, relative=True, backends=("triton",)),
                Prediction("time", "<=", 0.4, relative=True, case=_FEW, backends=("cuda",)),
                Prediction("time", "<=", 0.9, relative=True, case=_FEW, backends=("triton",)),
                Prediction("time", "<=", 0.9, relative=True, case=_PLAIN, backends=("triton",)),
                Prediction("time", "<=", 0.8, relative=True, case=_ODD, backends=("triton",)),
                Prediction("dram_share", ">=", 70, case=_FEW, backends=("cuda",)),
            ),
            launches=0,
            helpers=("norm_backward_sum_kernel",),
            profile_case={"cuda": _FEW},
        ),
    ),
)

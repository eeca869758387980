"""The sum, mean, maximum or its index (argmax) over any axes of a tensor of up to five axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kernel_twins.ops import baselines, ptx
from kernel_twins.ops.draws import long_rows
from kernel_twins.ops.reduction import nd_cases
from kernel_twins.ops.reduction.shared import KINDS, MOST_AXES, require_dims
from kernel_twins.spec import ITEMSIZE, Case, Drawn, Op, Output, Prediction, Step
from kernel_twins.spec.chance import Draws

if TYPE_CHECKING:
    from torch import Generator, Tensor

_MOST_OF_A_THREAD = 2**16  # elements of an output that one thread computes alone
_CHUNK = 2**26  # elements converted to float64 at a time, so that the reference of a huge tensor fits


# ----------------------------------------------------------------------------------------------------------------------
# Cases: axes.02 names the reduced axes (default: the last one), kind.max the kind, x.permuted the layout
# ----------------------------------------------------------------------------------------------------------------------


def _axes(case: Case) -> tuple[int, ...]:
    """The reduced axes, counted from the front."""
    return tuple(map(int, case.get("axes", str(len(case.shape) - 1))))


def _kept(case: Case) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(case.shape) if axis not in _axes(case))


def _reduced_count(case: Case) -> int:
    return math.prod(case.shape[axis] for axis in _axes(case))


def _inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """Standard normal values.

    ``x`` in the variant: ``permuted`` reverses the axes in memory, ``pitched`` leaves out 3 elements behind the last
    axis, ``sliced`` takes every second element along every axis, ``expanded`` gives the first axis a stride of 0.
    ``values``: those of tensors.normal; ``ties`` takes whole numbers, many of them equal; ``masked`` makes half of the
    elements minus infinity, and all at index 0 of the first axis; ``nans`` makes many NaN; ``hostile`` puts elements
    that are easily missed at ends and borders.
    """
    from kernel_twins.ops.tensors import borders, normal

    shape, layout = case.shape, case.get("x")
    if layout == "permuted":
        x = normal(case, shape[::-1], generator).permute(*range(len(shape))[::-1])
    elif layout == "pitched":
        x = normal(case, (*shape[:-1], shape[-1] + 3), generator)[..., : shape[-1]]
    elif layout == "sliced":
        x = normal(case, tuple(2 * size for size in shape), generator)[tuple(slice(None, None, 2) for _ in shape)]
    elif layout == "expanded":
        x = normal(case, (1, *shape[1:]), generator).expand(shape)
    else:
        x = normal(case, shape, generator)
    if case.get("values") == "hostile":
        for axis, size in enumerate(shape):
            x.movedim(axis, 0)[borders(size)] *= 4
        count, reduced = _reduced_count(case), _axes(case)
        if count <= _MOST_OF_A_THREAD:  # so that no sum of half precision is infinite
            x += 0.25
        else:  # so that fp32's sum does not lose more than half precision's rounding
            x *= max(math.sqrt(_MOST_OF_A_THREAD / count), 2.0**-6)
        if x.numel() and case.get("kind", "sum") in ("sum", "mean"):
            # Along the last of the reduced axes the first two elements are slightly above most, the last two are -most.
            # A kernel that misses one is off by more than rounding. They nearly cancel, so a bias shows in the sum. In
            # the longest rows the first two alone exceed half precision.
            most = min(max(16.0, count / 2**13), 2.0**15)
            firsts, lasts = (slice(1), slice(2)), (slice(-1, None), slice(-2, None))
            for (one, two), value in ((firsts, most + most / 64), (lasts, -most)):
                ends = (
                    two if axis == max(reduced) else one if axis in reduced else slice(None) for axis in range(x.dim())
                )
                x[tuple(ends)] = value
    if case.get("values") == "ties":
        x.round_()
    if case.get("values") == "masked":
        x[:1] = x[..., ::2] = -math.inf
    if case.get("values") == "nans":
        x[..., 3::7] = math.nan
    return (x,)


def _options(case: Case) -> dict[str, Any]:
    return {"dims": _axes(case), "kind": case.get("kind", "sum")}


def _accepts(case: Case) -> str:
    if not 1 <= len(case.shape) <= MOST_AXES:
        return f"x has {len(case.shape)} axes, must have 1 to {MOST_AXES}"
    if case.get("kind") in ("max", "argmax") and _reduced_count(case) == 0:
        return f"nothing has no {case.get('kind')}: the reduced axes hold no elements"
    return ""


def _bytes(case: Case) -> int:
    itemsize = ITEMSIZE[case.dtype]
    return math.prod(case.shape) * itemsize + math.prod(_kept(case)) * (8 if case.get("kind") == "argmax" else itemsize)


def _reference(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    """Values and terms. argmax is a whole number, and has no terms."""
    import torch

    from kernel_twins.ops.tensors import chain

    (x,), axes, kind = inputs, _axes(case), case.get("kind", "sum")
    whole = [axis for axis in range(x.dim()) if axis not in axes]
    x = x.permute(*whole, *axes)
    if whole:  # the first kept axis is the output's first dimension
        x = x[part]
    kept, count = x.shape[: len(whole)], _reduced_count(case)
    if kind == "argmax":
        return x.reshape(*kept, count).argmax(-1).view(kept or (1,)), torch.zeros(kept or (1,), device=x.device)
    values = torch.zeros(kept, dtype=torch.float64, device=x.device)
    terms = torch.zeros_like(values)
    if kind == "max":
        return x.double().amax(tuple(range(len(whole), x.dim()))).view(kept or (1,)), terms.view(kept or (1,))
    # In chunks along the first reduced axis, as large as fit.
    slices = max(1, _CHUNK * x.shape[len(whole)] // max(1, x.numel()))
    for chunk in x.split(slices, dim=len(whole)):
        wide = chunk.double().flatten(len(whole))
        values += wide.sum(-1)
        terms += wide.abs().sum(-1)
    terms += chain(min(count, _MOST_OF_A_THREAD)) * values.abs()
    if kind == "mean":
        values, terms = values / count if count else values / 0.0, terms / max(count, 1)
    return values.view(kept or (1,)), terms.view(kept or (1,))


def _check(x: Tensor, *, out: Tensor, dims: tuple[int, ...] = (-1,), kind: str = "sum") -> None:
    """x: 1 to 5 axes with any strides, fp32, bf16 or fp16; out: the kept axes, contiguous, of x's dtype or, for argmax,
    int64.
    """
    from kernel_twins.ops import tensors

    tensors.require_dtype("x", x, *ITEMSIZE)
    if not 1 <= x.dim() <= MOST_AXES:
        raise ValueError(f"x has {x.dim()} dimensions, must have 1 to {MOST_AXES}")
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, must be one of {', '.join(KINDS)}")
    axes = require_dims(dims, x.dim())
    if kind in ("max", "argmax") and math.prod(x.shape[axis] for axis in axes) == 0:
        raise IndexError(f"x has shape {tuple(x.shape)}, must have elements along dims for {kind}")
    if kind == "argmax":
        tensors.require_dtype("out", out, "int64")
    else:
        tensors.require_dtype("out", out, *ITEMSIZE)
        tensors.require_same_dtype("out", out, "x", x)
    tensors.require_device("out", out, "x", x)
    kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    tensors.require_shape("out", out, kept, "the axes of x that are not in dims")
    tensors.require_contiguous("out", out)
    tensors.require_apart(out, "x", x)


# ----------------------------------------------------------------------------------------------------------------------
# Baselines
# ----------------------------------------------------------------------------------------------------------------------


_PYTORCHS = {"sum": "sum", "mean": "mean", "max": "amax"}


def _function(x: Tensor, *, dims: tuple[int, ...] = (-1,), kind: str = "sum") -> Tensor:
    import torch

    if kind == "argmax":
        return torch.argmax(_reduced_last(x, dims), dim=-1)
    result: Tensor = getattr(torch, _PYTORCHS[kind])(x, dim=dims)
    return result


def _torch(x: Tensor, *, out: Tensor, dims: tuple[int, ...] = (-1,), kind: str = "sum") -> None:
    import torch

    if kind == "argmax":
        torch.argmax(_reduced_last(x, dims), dim=-1, out=out)
    else:
        getattr(torch, _PYTORCHS[kind])(x, dim=dims, out=out)


def _reduced_last(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """torch.argmax takes one dimension or all. Several are reshaped into one, with a copy if strides require it."""
    axes = [dim % x.dim() for dim in dims]
    kept = [axis for axis in range(x.dim()) if axis not in axes]
    return x.permute(*kept, *axes).flatten(len(kept))


# ----------------------------------------------------------------------------------------------------------------------
# Random cases
# ----------------------------------------------------------------------------------------------------------------------

# Number of axes, and which are reduced: rows, columns, a middle one, outer ones, statistics of channels, all.
_PLACES = ((2, "1"), (2, "0"), (3, "1"), (3, "02"), (4, "023"), (2, "01"))
_SINGLE = ((2, "1"), (2, "0"), (3, "1"), (2, "01"))  # for argmax, which takes one axis or all


def _draw(draws: Draws) -> Drawn:
    """One case in six has few and very long rows."""
    kind = draws.deal("kind", KINDS)
    rank, axes = draws.deal("axis", _SINGLE) if kind == "argmax" else draws.deal("axes", _PLACES)
    is_long = draws.deal("rows", ("any", "any", "any", "any", "any", "long")) == "long"
    if is_long:
        rank, axes = 2, "1"
        sizes = [*long_rows(draws)]
    else:
        sizes = [*(draws.number(2, 2**20) for _ in range(rank - 1)), draws.size(16, 2**17)]
    variant = {"axes": axes, "kind": kind}
    if layout := draws.deal("layout", ("", "permuted", "", "pitched")):
        variant["x"] = layout
    return Drawn(Case.of(*sizes, dtype=draws.deal("dtype", tuple(ITEMSIZE)), **variant))


# ----------------------------------------------------------------------------------------------------------------------
# The ladder
# ----------------------------------------------------------------------------------------------------------------------


def at_most(count: int) -> Any:
    """A step's ``accepts``: outputs of up to that many elements each."""

    def accepts(case: Case) -> str:
        found = _reduced_count(case)
        return "" if found <= count else f"an output is made of {found} elements, a thread takes {count}"

    return accepts


OP = Op(
    name="reduction_nd",
    family="reduction",
    chapter=17,
    title="Reduction over axes",
    summary="Sum, mean, maximum or its place over any axes of a tensor of up to five, whatever its strides. What is "
    "added costs nothing; where it lies is all there is to it.",
    inputs=_inputs,
    hostile=True,
    draw=_draw,
    outputs=lambda case: (Output(_kept(case), "int64" if case.get("kind") == "argmax" else case.dtype),),
    reference=_reference,
    check=_check,
    accepts=_accepts,
    options=_options,
    test_cases=nd_cases.TEST_CASES,
    huge_cases=nd_cases.HUGE_CASES,
    bench_cases=nd_cases.BENCH_CASES,
    headline_cases=nd_cases.HEADLINE_CASES,
    profile_case=nd_cases.ROWS,
    ceiling="dram_read",
    flops=lambda case: math.prod(case.shape),
    bytes=_bytes,
    baselines={"torch": _torch, "compile": baselines.compiled(_function)},
    behind={"cuda": ("v06_dispatch",), "triton": ("v06_dispatch",)},
    steps=(
        Step(
            name="v01_thread_per_output",
            predictions=(
                Prediction("dram_share", "<=", 30),
                Prediction("sectors_per_load", "==", 32, tolerance=0.1, backends=("cuda",)),
            ),
            accepts=at_most(_MOST_OF_A_THREAD),
        ),
        Step(
            name="v02_block_per_output",
            predictions=(
                Prediction("time", "<=", 0.5, relative=True),
                Prediction("sectors_per_load", "==", 2, tolerance=0.1, backends=("cuda",)),
                Prediction("time", ">=", 1.5, relative=True, case=nd_cases.MIDDLE),
            ),
        ),
        Step(
            name="v03_by_layout",
            predictions=(
                Prediction("time", "<=", 0.9, relative=True),
                Prediction("time", "<=", 0.3, relative=True, case=nd_cases.MIDDLE),
            ),
        ),
        Step(
            name="v04_vectorized",
            predictions=(
                Prediction("time", "<=", 0.8, relative=True),
                Prediction("instructions", "<=", 0.5, relative=True, backends=("cuda",)),
                Prediction("dram_share", ">=", 85),
            ),
            promises={80: (ptx.LOAD_16_BYTES,), 90: (ptx.LOAD_16_BYTES,)},
        ),
        Step(
            name="v05_split",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.03),
                Prediction("time", "<=", 0.7, relative=True, case=nd_cases.STATISTICS),
                Prediction("time", "<=", 0.1, relative=True, case=nd_cases.ALL),
                Prediction("time", "<=", 177, case=nd_cases.ALL, backends=("cuda",)),
                Prediction("time", "<=", 178, case=nd_cases.STATISTICS, backends=("cuda",)),
                Prediction("time", "<=", 178, case=nd_cases.MIDDLE, backends=("cuda",)),
                Prediction("time", "<=", 190, case=nd_cases.VOCABULARY, backends=("cuda",)),
                Prediction("time", "<=", 5.6, case=nd_cases.FEW, backends=("cuda",)),
            ),
            launches=0,
        ),
        Step(
            name="v06_dispatch",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02, case=nd_cases.COLUMNS),
                Prediction("time", "<=", 0.6, relative=True, case=nd_cases.ODD_COLUMNS, backends=("cuda",)),
                Prediction("instructions", "<=", 0.5, relative=True, case=nd_cases.ODD_COLUMNS),
                Prediction("dram_share", ">=", 75, case=nd_cases.ODD_COLUMNS, backends=("cuda",)),
                Prediction("time", "<=", 0.7, relative=True, case=nd_cases.ODD_COLUMNS, backends=("triton",)),
                Prediction("dram_share", ">=", 70, case=nd_cases.ODD_COLUMNS, backends=("triton",)),
            ),
            profile_case={"cuda": nd_cases.ODD_COLUMNS, "triton": nd_cases.ODD_COLUMNS},
        ),
    ),
)

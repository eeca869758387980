"""reduction_nd without a GPU: how axes are merged, in both languages, and what its spec computes and refuses."""

from __future__ import annotations

import importlib
import itertools
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kernel_twins import OPS, load_baseline  # noqa: E402
from kernel_twins.harness.check import check, generator  # noqa: E402
from kernel_twins.ops.tensors import empty_outputs  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
OP = OPS["reduction_nd"]
axes = importlib.import_module("kernel_twins._triton.reduction.reduction_nd.axes")

# Prints, of every line of input (a rank, ordered, sizes, strides, and which are reduced), the kept and reduced axes.
PROGRAM = """
#include <iostream>
#include "merged_axes.h"
int main() {
  int rank, ordered;
  while (std::cin >> rank >> ordered) {
    int64_t sizes[MOST_AXES], strides[MOST_AXES];
    bool reduced[MOST_AXES];
    for (int a = 0; a < rank; ++a) std::cin >> sizes[a];
    for (int a = 0; a < rank; ++a) std::cin >> strides[a];
    for (int a = 0; a < rank; ++a) std::cin >> reduced[a];
    for (bool which : {false, true}) {
      const Axes axes = axes_of(rank, sizes, strides, reduced, which, which ? ordered : true);
      for (int a = 0; a < axes.rank; ++a) {
        const Axis& axis = axes.axis[a];
        std::cout << axis.size << ' ' << axis.stride << ' ' << axis.step << ' ';
        if (axis.size > 1 && axis.reciprocal != ~uint64_t{0} / axis.size) return 1;
      }
      std::cout << axes.count << '\\n';
    }
  }
}
"""


@st.composite
def tensors(draw: Any) -> tuple[Any, list[int]]:
    """A view of any strides whose elements are all different, but for expanded axes, and axes to reduce."""
    rank = draw(st.integers(1, 5))
    sizes = [draw(st.integers(0, 4)) for _ in range(rank)]
    steps = [draw(st.integers(1, 2)) for _ in range(rank)]
    order = draw(st.permutations(range(rank)))
    storage = torch.arange(math.prod(size * step for size, step in zip(sizes, steps, strict=True)))
    x = storage.view([size * step for size, step in zip(sizes, steps, strict=True)])
    x = x[tuple(slice(None, None, step) for step in steps)].permute(order)
    for axis in range(rank):
        if x.shape[axis] > 0 and draw(st.booleans()) and draw(st.booleans()):
            x = x.narrow(axis, 0, 1).expand(*x.shape[:axis], draw(st.integers(1, 3)), *x.shape[axis + 1 :])
    return x, [axis for axis in range(rank) if draw(st.booleans())]


def places(found: Any) -> list[tuple[int, int]]:
    """Where each element lies, and its place, in the order in which kernels walk."""
    coordinates = itertools.product(*(range(axis.size) for axis in found))
    return [
        (
            sum(at * axis.stride for at, axis in zip(each, found, strict=True)),
            sum(at * axis.step for at, axis in zip(each, found, strict=True)),
        )
        for each in coordinates
    ]


def of_sizes(x: Any, chosen: list[int]) -> list[tuple[int, int]]:
    """The same of those axes as they are: offsets in row-major order, which is the place."""
    coordinates = itertools.product(*(range(x.shape[axis]) for axis in chosen))
    return [
        (sum(at * x.stride(axis) for at, axis in zip(each, chosen, strict=True)), place)
        for place, each in enumerate(coordinates)
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Axes
# ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(tensors())
def test_axes_lead_to_every_element_and_to_its_place(given_tensor) -> None:
    x, reduced = given_tensor
    whole = [axis for axis in range(x.dim()) if axis not in reduced]
    kept, gone = axes.split(x.shape, x.stride(), reduced, ordered=True)
    assert sorted(places(kept)) == sorted(of_sizes(x, whole))
    assert sorted(places(gone)) == sorted(of_sizes(x, reduced))
    assert axes.count(kept) == math.prod(x.shape[axis] for axis in whole)
    _, unordered = axes.split(x.shape, x.stride(), reduced, ordered=False)
    assert sorted(offset for offset, _ in places(unordered)) == sorted(offset for offset, _ in of_sizes(x, reduced))
    assert len(unordered) <= len(gone) <= max(len(reduced), 1)


@pytest.mark.parametrize(
    ("shape", "order", "reduced", "kept", "gone"),
    [
        ((6, 5), (0, 1), [1], [(6, 5, 1)], [(5, 1, 1)]),
        ((6, 5), (0, 1), [0], [(5, 1, 1)], [(6, 5, 1)]),
        ((6, 5), (1, 0), [0], [(6, 5, 1)], [(5, 1, 1)]),
        ((6, 5), (0, 1), [0, 1], [(1, 0, 0)], [(30, 1, 1)]),
        ((6, 5), (0, 1), [], [(30, 1, 1)], [(1, 0, 0)]),
        ((6, 5, 4, 3), (0, 1, 2, 3), [0, 2, 3], [(5, 12, 1)], [(6, 60, 12), (12, 1, 1)]),
        ((6, 5, 4, 3), (0, 1, 2, 3), [1, 2], [(6, 60, 3), (3, 1, 1)], [(20, 3, 1)]),
        ((6, 1, 5), (0, 1, 2), [2], [(6, 5, 1)], [(5, 1, 1)]),
        # In memory, 4 x 5 x 6: whole where the order of elements is nothing to the result.
        ((4, 5, 6), (2, 1, 0), [0, 1, 2], [(1, 0, 0)], [(4, 30, 1), (5, 6, 4), (6, 1, 20)]),
    ],
)
def test_axes_are_as_few_as_can_be(shape, order, reduced, kept, gone) -> None:
    x = torch.empty(shape).permute(order)
    assert axes.split(x.shape, x.stride(), reduced, ordered=True) == (tuple(kept), tuple(gone))
    if x.dim() == 3 and len(reduced) == 3:
        assert axes.split(x.shape, x.stride(), reduced, ordered=False)[1] == ((120, 1, 20),)


def test_tiles_lie_along_what_is_contiguous() -> None:
    x = torch.empty(6, 5, 4)
    for view, reduced, along in (
        (x, [2], True),
        (x, [1], False),
        (x, [0, 2], True),
        (x.permute(2, 1, 0), [0], True),
        (x.permute(2, 1, 0), [2], False),
        (x[:, :, :1].expand(6, 5, 4), [2], False),  # a row is one number: neighbours are the rows
        (x[:1, :1, :1].expand(6, 5, 4), [1], True),
    ):
        assert axes.along_reduced(*axes.split(view.shape, view.stride(), reduced, True)) == along


def test_both_languages_find_the_same_axes(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source, program = tmp_path / "axes.cpp", tmp_path / "axes"
    source.write_text(PROGRAM)
    include = ROOT / "cuda-kernels" / "reduction" / "reduction_nd"
    subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-Wall",
            "-Werror",
            f"-I{include}",
            f"-I{ROOT / 'cuda-kernels'}",
            source,
            "-o",
            program,
        ],
        check=True,
    )
    lines, expected = [], []

    @settings(max_examples=500, database=None)
    @given(tensors(), st.booleans())
    def collect(given_tensor: Any, ordered: bool) -> None:
        x, reduced = given_tensor
        which = [int(axis in reduced) for axis in range(x.dim())]
        lines.append(" ".join(map(str, [x.dim(), int(ordered), *x.shape, *x.stride(), *which])))
        for found in axes.split(x.shape, x.stride(), reduced, ordered):
            expected.append(" ".join(map(str, [*itertools.chain(*found), axes.count(found)])))

    collect()
    run = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == expected


# ----------------------------------------------------------------------------------------------------------------------
# The spec
# ----------------------------------------------------------------------------------------------------------------------


def inputs_of(case: Case) -> tuple[Any, ...]:
    return OP.inputs(case, generator(case, "cpu"))


@pytest.mark.parametrize("case", [case for case in OP.test_cases if case.dtype == "bf16"], ids=lambda case: case.slug)
def test_pytorch_is_right_by_the_spec(case) -> None:
    (x,) = inputs_of(case)
    out = empty_outputs(OP, case, "cpu")
    OP.check(x, out=out, **OP.options(case))
    verdict = check(OP, load_baseline("reduction_nd", "torch"), case, device="cpu")
    assert verdict.ok, verdict.reason


def reduced(x: Any, dims: tuple[int, ...], kind: str) -> Any:
    if kind == "argmax":
        return torch.argmax(x.permute(*[a for a in range(x.dim()) if a not in dims], *dims).flatten(-len(dims)), -1)
    return {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[kind](x, dims)


WRONG = {
    "the last element is missed": lambda x, dims, kind: reduced(
        x.narrow(dims[-1], 0, x.shape[dims[-1]] - 1), dims, kind
    ),
    "another axis": lambda x, dims, kind: reduced(x.transpose(0, 1), dims, kind),
    "summed in bf16": lambda x, dims, kind: x.bfloat16().cumsum(dims[-1])[..., -1],
    "the last of equals": lambda x, dims, kind: x.shape[-1] - 1 - x.flip(-1).argmax(-1),
    "NaN is left out": lambda x, dims, kind: reduced(x.nan_to_num(-math.inf), dims, kind),
}


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        ("the last element is missed", Case.of(33, 71, dtype="fp32")),
        ("the last element is missed", Case.of(33, 71, dtype="bf16", values="tail")),
        ("another axis", Case.of(33, 33, dtype="fp32", kind="mean")),
        ("another axis", Case.of(33, 33, dtype="fp32", kind="argmax")),
        ("summed in bf16", Case.of(33, 700, dtype="fp32")),
        ("the last of equals", Case.of(33, 71, dtype="fp32", kind="argmax", values="ties")),
        ("the last of equals", Case.of(33, 71, dtype="bf16", kind="argmax", values="masked")),
        ("NaN is left out", Case.of(33, 71, dtype="bf16", kind="argmax", values="nans")),
        ("NaN is left out", Case.of(33, 71, dtype="bf16", kind="max", values="nans")),
    ],
    ids=lambda each: each if isinstance(each, str) else each.slug,
)
def test_wrong_results_are_found(wrong, case) -> None:
    def call(x: Any, *, out: Any, dims: tuple[int, ...], kind: str) -> None:
        out.copy_(WRONG[wrong](x, dims, kind))

    assert not check(OP, call, case, device="cpu").ok


def test_references_are_the_same_in_pieces(monkeypatch) -> None:
    spec = importlib.import_module("kernel_twins.ops.reduction.reduction_nd")
    for variant in ({"axes": "1"}, {"axes": "02"}, {"axes": "0", "kind": "mean"}, {"axes": "12", "kind": "argmax"}):
        case = Case.of(6, 50, 7, dtype="fp32", **variant)
        inputs = inputs_of(case)
        rows = OP.outputs(case)[0].shape[0]
        whole = OP.reference(case, inputs, slice(0, rows))
        monkeypatch.setattr(spec, "_CHUNK", 64)
        pieces = [OP.reference(case, inputs, slice(start, min(start + 4, rows))) for start in range(0, rows, 4)]
        for index in range(2):
            torch.testing.assert_close(torch.cat([piece[index] for piece in pieces]), whole[index])


def test_cases_cover_what_an_input_may_be() -> None:
    for wanted in ({"x": "permuted"}, {"x": "pitched"}, {"x": "sliced"}, {"x": "expanded"}, {"offset": "1"}):
        for kind in ({}, {"kind": "argmax"}):
            assert any((wanted | kind).items() <= dict(case.variant).items() for case in OP.test_cases), (wanted, kind)
    assert {len(case.shape) for case in OP.test_cases} >= {1, 2, 3, 5}
    assert max(math.prod(case.shape) for case in OP.huge_cases) > 2**31
    assert all(OP.accepts(case) == "" for case in OP.test_cases)


def test_the_largest_of_nothing_and_too_many_axes_are_refused() -> None:
    assert "nothing has no max" in OP.accepts(Case.of(5, 0, dtype="fp32", kind="max"))
    assert "x has 6 axes" in OP.accepts(Case.of(1, 1, 1, 1, 1, 1, dtype="fp32"))
    x, out = torch.zeros(3, 8), torch.zeros(3)
    for given_x, options, given_out, error, message in (
        (x.double(), {}, out, TypeError, "x is torch.float64, must be torch.float32 or"),
        (torch.zeros(()), {}, out, ValueError, "x has 0 dimensions, must have 1 to 5"),
        (x, {"kind": "min"}, out, ValueError, "kind is 'min', must be one of sum, mean, max, argmax"),
        (x, {"dims": (2,)}, out, IndexError, r"dims is \(2,\), each must be from -2 to 1: x has 2 dimensions"),
        (x, {"dims": (1, -1)}, out, ValueError, r"dims is \(1, -1\), must name no axis twice"),
        (x[:, :0], {"kind": "argmax"}, out.long(), IndexError, r"x has shape \(3, 0\), must have elements along dims"),
        (x, {"kind": "argmax"}, out, TypeError, "out is torch.float32, must be torch.int64"),
        (x, {}, out.half(), TypeError, "out is torch.float16, must be torch.float32 like x: allocate it"),
        (x, {"dims": (0,)}, out, ValueError, r"out has shape \(3,\), must have \(8,\): the axes of x that are not in"),
        (x, {}, torch.zeros(6)[::2], ValueError, "out has strides .*, must be contiguous: allocate it so with"),
        (x, {}, x.view(-1)[:3], ValueError, "out overlaps x in memory"),
    ):
        with pytest.raises(error, match=message):
            OP.check(given_x, out=given_out, **options)


def test_least_traffic_is_reading_x_once() -> None:
    assert OP.bytes(Case.of(8, 16, dtype="bf16")) == 8 * 16 * 2 + 8 * 2
    assert OP.bytes(Case.of(8, 16, dtype="fp32", axes="0", kind="argmax")) == 8 * 16 * 4 + 16 * 8

"""layer_norm and rms_norm on a GPU: right for every layout, and at home in graphs, streams and compilers."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.functional.norm import norm  # noqa: E402
from kernel_twins.harness.check import compare, generator  # noqa: E402
from kernel_twins.ops.tensors import name_of  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

pytestmark = pytest.mark.gpu

NAMES = ("layer_norm", "rms_norm")
OURS = pytest.mark.parametrize("backend", ["cuda", "triton"])
ALL = pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "torch"])
BY_NAME = pytest.mark.parametrize("name", NAMES)
BY_RESIDUAL = pytest.mark.parametrize("adds", [False, True], ids=["plain", "residual"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}  # of the ladders' cases
EVERY_CASE = [(name, case) for name in NAMES for case in OPS[name].test_cases if case.dtype == "bf16"]
EVERY_BACKWARD_CASE = [
    (name, case) for name in NAMES for case in OPS[f"{name}_backward"].test_cases if case.dtype == "bf16"
]
SHAPES = [
    ((1,), 1),
    ((7,), 1),
    ((300, 1), 1),
    ((33, 257), 1),
    ((33, 257), 2),
    ((4, 5, 64), 1),
    ((4, 5, 64), 2),
    ((2, 3, 4, 1000), 1),
    ((9, 17, 5, 9), 3),
    ((3, 70_000), 1),
    ((1_000_003, 3), 1),
]
EMPTY = [((0, 5), 1), ((5, 0), 1), ((0, 0), 1), ((2, 0, 3), 1), ((2, 0, 3), 2), ((0, 2, 3), 2), ((0,), 1)]
LAYOUTS = {
    "pitched": (lambda x: x[..., :-3], 1),
    "offset": (lambda x: x[..., 1:], 1),
    "apart": (lambda x: x[..., 1 : x.shape[-1] // 2], 1),
    "expanded": (lambda x: x[:1, :1].expand(x.shape), 1),
    "two": (lambda x: x[::2], 2),
    "one": (lambda x: x[0, 0], 1),
}
"""Whose rows lie as they are read, and how many dimensions they have."""
COPIED = {
    "spread": (lambda x: x[..., ::2], 1),
    "crossed": (lambda x: x.transpose(0, 1), 1),
    "batches": (lambda x: x[:1].expand(x.shape), 1),
    "gaps": (lambda x: x[..., :-3], 2),
    "moved": (lambda x: x.permute(2, 0, 1), 1),
    "turned": (lambda x: x.transpose(1, 2), 2),
}
SLACK = 2**20  # bytes: torch's allocator rounds up


def values(*shape: int, dtype: Any = torch.bfloat16, requires_grad: bool = False, seed: int = 0) -> Any:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=dtype, device="cuda", requires_grad=requires_grad)


def weights(name: str, shape: Any, dtype: Any = torch.bfloat16, requires_grad: bool = False) -> tuple[Any, ...]:
    """weight and bias, where the norm has them."""
    made = [values(*shape, dtype=dtype, requires_grad=requires_grad, seed=seed) for seed in (2, 3)]
    return tuple(made if name == "layer_norm" else made[:1])


def called(name: str, backend: str, x: Any, shape: Any, affine: Any = (), residual: Any = None) -> Any:
    return getattr(kernel_twins, name)(x, shape, *affine, eps=EPS[name], residual=residual, backend=backend)


def pytorchs(name: str, x: Any, shape: Any, affine: Any = (), residual: Any = None) -> Any:
    added = x if residual is None else x + residual
    y = getattr(torch.nn.functional, name)(added, shape, *affine, eps=EPS[name])
    return y if residual is None else (y, added)


def tensors(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def present(*given: Any) -> list[Any]:
    return [each for each in given if each is not None]


def operator(name: str, backend: str) -> Any:
    if backend == "triton":
        called("layer_norm", backend, values(1, 1), (1,))  # registers them
    return getattr(torch.ops.kernel_twins, name if backend == "cuda" else f"{name}_triton").default


def forward(name: str, backend: str, x: Any, shape: Any, affine: Any, residual: Any) -> tuple[Any, ...]:
    """All that the operator returns, in the order of the ladder's outputs: the sum is last."""
    affine = (*affine, None, None)[: 1 + (name == "layer_norm")]
    if residual is None:
        return operator(name, backend)(x, list(shape), *affine, EPS[name])
    y, added, *statistics = operator(f"add_{name}", backend)(x, residual, list(shape), *affine, EPS[name])
    return y, *statistics, added


def rows(tensor: Any, dims: int) -> Any:
    if tensor is None:
        return None
    n = math.prod(tensor.shape[-dims:])
    return tensor.detach().reshape(tensor.numel() // n, n)


def flat(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().reshape(-1)


def assert_right(op: str, inputs: Any, outputs: Any) -> None:
    """By the one rule of accuracy, which NaN does not pass (see kernel_twins/harness/check.py)."""
    case = Case.of(*inputs[0].shape, dtype=name_of(inputs[0].dtype))
    verdict = compare(OPS[op], case, tuple(inputs), tuple(outputs))
    assert verdict.ok, verdict.reason


def assert_both_right(name: str, backend: str, x: Any, dims: int, affine: Any, residual: Any, douts: Any) -> None:
    """Results, statistics, and gradients from the statistics; ``affine`` has a weight, or nothing."""
    row = x.shape[-dims:]
    x = x.detach().requires_grad_()
    residual = None if residual is None else residual.detach().requires_grad_()
    y, *statistics = forward(name, backend, x, row, affine, residual)
    added = statistics.pop() if residual is not None else None
    results = present(y, added)
    assert all(each.shape == x.shape and each.dtype == x.dtype and each.is_contiguous() for each in results)
    assert all(each.shape == x.shape[:-dims] and each.dtype == torch.float32 for each in statistics)
    vectors = [flat(each) for each in (*affine, None, None)[: 1 + (name == "layer_norm")]]
    found = [rows(y, dims), *map(flat, statistics), *([] if added is None else [rows(added, dims)])]
    assert_right(name, (rows(x, dims), *vectors, rows(residual, dims)), found)

    wanted = present(x, residual, *affine)
    alone = torch.autograd.grad(y, affine, douts[0], retain_graph=True) if affine else ()
    dx, *others = torch.autograd.grad(results, wanted, douts)
    if residual is not None:
        assert torch.equal(dx, others.pop(0))
    normalised = x if added is None else added
    dadded = rows(douts[1], dims) if added is not None else None
    given = (rows(douts[0], dims), rows(normalised, dims), *map(flat, statistics), vectors[0], dadded)
    for sums in (others, alone) if affine else (others,):
        assert_right(f"{name}_backward", given, (rows(dx, dims), *map(flat, sums)))


# ----------------------------------------------------------------------------------------------------------------------
# Values
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@pytest.mark.parametrize(("name", "case"), EVERY_CASE, ids=lambda each: each if isinstance(each, str) else each.slug)
def test_every_case_of_the_ladder_is_right(backend, name, case) -> None:
    inputs = OPS[name].inputs(case, generator(case, "cuda"))
    x, *others = inputs
    residual = others.pop() if case.get("residual") == "yes" else None
    verdict = compare(OPS[name], case, inputs, forward(name, backend, x, x.shape[1:], others, residual))
    assert verdict.ok, verdict.reason


@OURS
@pytest.mark.parametrize(
    ("name", "case"), EVERY_BACKWARD_CASE, ids=lambda each: each if isinstance(each, str) else each.slug
)
def test_every_case_of_the_backward_ladder_is_right(backend, name, case) -> None:
    op = OPS[f"{name}_backward"]
    inputs = op.inputs(case, generator(case, "cuda"))
    fixed = 3 + (name == "layer_norm")
    statistics = inputs[2:fixed]
    weight, dadded = (*inputs[fixed:], None, None)[:2]
    asked = (True, *[weight is not None] * len(statistics))
    dx, *sums = operator(op.name, backend)(*inputs[:fixed], weight, dadded, *asked)
    verdict = compare(op, case, inputs, (dx, *sums) if weight is not None else (dx,))
    assert verdict.ok, verdict.reason


@OURS
@BY_NAME
@BY_DTYPE
@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
def test_any_dimensions_of_any_shape(backend, name, dtype, shape, dims) -> None:
    x, residual = (values(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    affine = weights(name, shape[-dims:], dtype, requires_grad=True)
    douts = [values(*shape, dtype=dtype, seed=seed) for seed in (4, 5)]
    assert_both_right(name, backend, x, dims, affine, None, douts[:1])
    assert_both_right(name, backend, x, dims, affine, residual, douts)
    assert_both_right(name, backend, x, dims, (), residual, douts)


@OURS
@BY_NAME
@BY_DTYPE
@pytest.mark.parametrize(
    ("shape", "gap"),
    [
        ((1, 2**22), 3),
        ((3, 2**21 + 4), 8),
        ((5, 1_703_937), 3),
        ((9, 655_362), 8),
        ((33, 300_007), 3),
        ((150, 70_001), 3),
    ],
    ids=str,
)
def test_few_rows_that_no_cluster_holds(backend, name, dtype, shape, gap) -> None:
    """Rows of every skew, and other ones in x than in the result; some whose pairs or fours are aligned."""
    x, residual, *douts = (values(shape[0], shape[1] + gap, dtype=dtype, seed=seed)[:, :-gap] for seed in (0, 1, 4, 5))
    affine = weights(name, shape[1:], dtype, requires_grad=True)
    assert_both_right(name, backend, x, 1, affine, None, douts[:1])
    assert_both_right(name, backend, x, 1, affine, residual, douts)
    assert_both_right(name, backend, x, 1, (), None, douts[:1])


@OURS
@BY_NAME
@BY_DTYPE
@pytest.mark.parametrize("n", [1, 3, 8, 17, 33, 48, 64, 130, 240, 333, 512, 515, 1_023, 1_024, 1_027, 1_999, 2_047])
def test_short_rows_that_start_anywhere(backend, name, dtype, n) -> None:
    """x and the residual at skews of their own; as many rows as fill no tile, and several tiles but not the last."""

    def spread(m, place, seed):
        """[m, n]. ``place``: how many elements more from row to row than a row has, and how many into a word."""
        pitch, offset = place
        storage = values(m * (n + pitch) + offset, dtype=dtype, seed=seed)
        return storage[offset:].as_strided((m, n), (n + pitch, 1))

    affine = weights(name, (n,), dtype, requires_grad=True)
    for m, of_x, of_residual in (
        (1, (0, 1), (0, 1)),
        (5, (0, 0), (0, 0)),
        (5, (0, 0), (3, 0)),
        (611, (3, 1), (1, 0)),
        (611, (0, 1), (0, 0)),
        (4_001, (8, 0), (n + 5, 2)),
        (4_001, (0, 0), (0, 0)),
    ):
        x, residual = spread(m, of_x, seed=0), spread(m, of_residual, seed=1)
        douts = [values(m, n, dtype=dtype, seed=seed) for seed in (4, 5)]
        assert_both_right(name, backend, x, 1, affine, None, douts[:1])
        assert_both_right(name, backend, x, 1, affine, residual, douts)
        assert_both_right(name, backend, x, 1, (), residual, douts)


@OURS
@BY_NAME
@BY_RESIDUAL
@pytest.mark.parametrize("n", [1, 7, 33, 61, 333, 1_027])
def test_nan_stays_in_its_row(backend, name, adds, n) -> None:
    """Rows of odd length share words with their neighbours."""
    x, residual = values(2_001, n), values(2_001, n, seed=1)
    affine = weights(name, (n,))
    for rows_with_nan in (slice(1, None, 3), slice(-1, None)):
        poisoned = x.clone()
        poisoned[rows_with_nan, n // 2] = math.nan
        found, right = (
            tensors(called(name, backend, each, (n,), affine, residual if adds else None)) for each in (poisoned, x)
        )
        sound = torch.ones(len(x), dtype=torch.bool, device="cuda")
        sound[rows_with_nan] = False
        assert all(torch.equal(each[sound], expected[sound]) for each, expected in zip(found, right, strict=True))
        assert bool(found[0][~sound].isnan().all())


@OURS
@BY_NAME
@pytest.mark.parametrize("layout", [*LAYOUTS, *COPIED])
def test_any_strides(backend, name, layout) -> None:
    of, dims = (LAYOUTS | COPIED)[layout]
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (40, 1029)):
        x, residual, *douts = (of(values(6, 5, n, dtype=dtype, seed=seed)) for seed in (0, 1, 4, 5))
        affine = weights(name, x.shape[-dims:], dtype, requires_grad=True)
        assert_both_right(name, backend, x, dims, affine, residual, douts)
        # Contiguous ones beside them, and weights that have gaps.
        dense = [values(*x.shape, dtype=dtype, seed=seed) for seed in (4, 5)]
        gaps = tuple(torch.stack([each, each], -1)[..., 0].detach().requires_grad_() for each in affine)
        assert_both_right(name, backend, x, dims, gaps, values(*x.shape, dtype=dtype, seed=1), dense)


@OURS
@BY_NAME
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("n", [5003, 2051, 65_536])
def test_weights_may_start_within_a_word(backend, name, dtype, n) -> None:
    """At an odd multiple of 2 bytes, beside rows that are aligned, if not all of an odd length; a program has many."""
    m = min(4096, 2**25 // n)
    x, residual = (values(m, n, dtype=dtype, seed=seed) for seed in (0, 1))
    affine = tuple(each[1:].detach().requires_grad_() for each in weights(name, (n + 1,), dtype))
    assert all(each.data_ptr() % 4 == 2 for each in affine) and x.data_ptr() % 32 == 0
    douts = [values(m, n, dtype=dtype, seed=seed) for seed in (4, 5)]
    assert_both_right(name, backend, x, 1, affine, None, douts[:1])
    assert_both_right(name, backend, x, 1, affine, residual, douts)
    if name == "layer_norm":  # one of them alone is enough
        for kind in (0, 1):
            mixed = [each if i == kind else each.detach().clone().requires_grad_() for i, each in enumerate(affine)]
            assert_both_right(name, backend, x, 1, tuple(mixed), None, douts[:1])


@OURS
@BY_NAME
@BY_DTYPE
@pytest.mark.parametrize("n", [1, 3, 13, 29, 61, 120, 250, 515, 544, 1027, 2049, 4288, 5003, 5376, 11_184])
def test_many_ragged_rows(backend, name, dtype, n) -> None:
    """So many that whoever takes them reuses all room; alike in all matrices, and of another skew in each."""
    m = min(2**24 // n, 2**18) + 1
    x, residual = (values(m, n + pad, dtype=dtype, seed=pad)[:, :n] for pad in (3, 1))
    affine = weights(name, (n,), dtype, requires_grad=True)
    douts = [values(m, n + pad, dtype=dtype, seed=4 + pad)[:, :n] for pad in (0, 5)]
    assert_both_right(name, backend, x.contiguous(), 1, affine, None, douts[:1])
    assert_both_right(name, backend, x, 1, affine, residual, douts)
    assert_both_right(name, backend, x, 1, (), None, douts[:1])


@OURS
@BY_NAME
@BY_DTYPE
@pytest.mark.parametrize("n", [1, 5, 61, 515, 1024, 1027, 5003, 70_001])
def test_what_a_row_holds_stays_in_its_row_of_dx(backend, name, dtype, n) -> None:
    """Not a number in it, nor an infinity; rows of x that start at every alignment, beside contiguous ones of dout."""
    m = 700 if n < 5003 else 9
    x = values(m, n + 3, dtype=dtype)[:, :n].detach()
    affine, dout = weights(name, (n,), dtype), values(m, n, dtype=dtype, seed=4)
    hostile = x.clone()
    hostile[0, -1], hostile[m // 2, 0], hostile[-1, n // 2] = float("nan"), float("inf"), float("nan")
    pitched = torch.empty(m, n + 3, dtype=dtype, device="cuda")[:, :n].copy_(hostile)
    found = []
    for each in (x, pitched):
        each.requires_grad_()
        found.append(torch.autograd.grad(called(name, backend, each, (n,), affine), each, dout)[0])
    kept = [row for row in range(m) if row not in (0, m // 2, m - 1)]
    assert torch.equal(found[0][kept], found[1][kept])
    assert found[1][[0, m - 1]].isnan().all()


@BY_RESIDUAL
@BY_DTYPE
def test_a_row_of_one_element_has_no_gradient_through_layer_norm(adds, dtype) -> None:
    """Exactly none in CUDA, whatever the rounding: the element is its own mean."""
    for m in (1, 2, 33, 5_003):
        x = (3 + values(m, 4, dtype=dtype))[:, :1].detach().requires_grad_()
        residual = values(m, 1, dtype=dtype, seed=1) if adds else None
        results = tensors(called("layer_norm", "cuda", x, (1,), weights("layer_norm", (1,), dtype), residual))
        douts = [values(m, 1, dtype=dtype, seed=seed) for seed in (4, 5)[: len(results)]]
        dx = torch.autograd.grad(results, x, douts)[0]
        assert torch.equal(dx, douts[1] if adds else torch.zeros_like(dx))


@OURS
def test_weights_may_come_alone(backend) -> None:
    for shape, adds in itertools.product(((33, 257), (5, 5003)), (False, True)):
        x, bias = values(*shape, requires_grad=True), values(shape[1], requires_grad=True, seed=3)
        residual = values(*shape, requires_grad=True, seed=1) if adds else None
        dout = values(*shape, seed=4)
        y = tensors(called("layer_norm", backend, x, shape[1:], (None, bias), residual))[0]
        wide = [None if each is None else each.detach().double().requires_grad_() for each in (x, bias, residual)]
        added = wide[0] if residual is None else (x + residual).detach().double().requires_grad_()
        right = pytorchs("layer_norm", added, shape[1:], (None, wide[1]))
        torch.testing.assert_close(y, right.bfloat16(), rtol=2e-2, atol=2e-2)
        got = torch.autograd.grad(y, (x, bias), dout)
        expected = torch.autograd.grad(right, (added, wide[1]), dout.double())
        torch.testing.assert_close(got, tuple(each.bfloat16() for each in expected), rtol=2e-2, atol=2e-2)


@OURS
@BY_NAME
def test_frozen_weights(backend, name) -> None:
    """Only x wants a gradient: the same one as where weights want theirs, too."""
    for shape in ((33, 257), (64, 4096), (3, 70_000)):
        x, dout = values(*shape, requires_grad=True), values(*shape, seed=4)
        found = []
        for learns in (True, False):
            affine = weights(name, shape[1:], requires_grad=learns)
            y = called(name, backend, x, shape[1:], affine)
            found.append(torch.autograd.grad(y, (x, *affine) if learns else (x,), dout)[0])
        torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
        affine = weights(name, shape[1:], requires_grad=True)
        y = called(name, backend, x.detach(), shape[1:], affine)
        got = torch.autograd.grad(y, affine, dout)
        y = called(name, backend, x, shape[1:], affine)
        again = torch.autograd.grad(y, affine, dout)
        torch.testing.assert_close(again, got, rtol=1e-2, atol=1e-2)
        # A node in Python is not told what a pass wants, and sums by another kernel where x wants a gradient.
        assert backend == "triton" or all(map(torch.equal, again, got))


@ALL
@BY_NAME
def test_expanded_gradients(backend, name) -> None:
    """Of .sum() and .mean(), whose gradient is one number seen many times: the commonest fault of such libraries."""
    for shape, dims in (((33, 1000), 1), ((4, 5, 64), 2), ((7, 70_000), 1)):
        x, residual = (values(*shape, dtype=torch.float32, requires_grad=True, seed=seed) for seed in (0, 1))
        affine = weights(name, shape[-dims:], torch.float32, requires_grad=True)
        factor = values(1, dtype=torch.float32, seed=6)
        for of in (lambda y, a: y.sum(), lambda y, a: (y * a).mean() + a.sum(), lambda y, a, f=factor: (y * f).sum()):
            wide = [each.detach().double().requires_grad_() for each in (x, residual, *affine)]
            y, added = called(name, backend, x, shape[-dims:], affine, residual)
            got = torch.autograd.grad(of(y, added), (x, residual, *affine))
            y, added = pytorchs(name, wide[0], shape[-dims:], wide[2:], wide[1])
            right = torch.autograd.grad(of(y, added), wide)
            for each, expected in zip(got, right, strict=True):
                torch.testing.assert_close(each.double(), expected, rtol=1e-4, atol=1e-4)


@OURS
@BY_NAME
@BY_RESIDUAL
@pytest.mark.parametrize(("shape", "dims"), EMPTY, ids=str)
def test_nothing_at_all(backend, name, adds, shape, dims) -> None:
    row = shape[-dims:]
    x, residual = values(*shape, requires_grad=True), values(*shape, seed=1) if adds else None
    affine = weights(name, row, requires_grad=True)
    results = tensors(called(name, backend, x, row, affine, residual))
    assert all(each.shape == shape and each.is_contiguous() for each in results)
    dx, *sums = torch.autograd.grad(results[0].sum(), (x, *affine))
    assert dx.shape == shape and all(each.shape == row and not each.any() for each in sums)
    assert called(name, "auto", x, row, affine).shape == shape


@OURS
@BY_NAME
def test_weights_gradients_are_the_same_bits_every_time(backend, name) -> None:
    """With dx and without it."""
    for shape, learns in itertools.product(
        ((5_000, 257), (40_000, 515), (300, 4096), (64, 65_536), (40, 300_007), (3, 4_000_003)), (False, True)
    ):
        x, dout = values(*shape, requires_grad=learns), values(*shape, seed=4)
        affine = weights(name, shape[1:], requires_grad=True)
        y = called(name, backend, x, shape[1:], affine)
        wanted = (*affine, x) if learns else affine
        first, *others = (torch.autograd.grad(y, wanted, dout, retain_graph=True) for _ in range(4))
        assert all(map(torch.equal, first * len(others), itertools.chain(*others)))


@ALL
@BY_NAME
def test_other_dtypes_are_pytorchs_or_refused(backend, name) -> None:
    double, half = values(3, 5, dtype=torch.float64), values(3, 5)
    narrow, wide = values(5, seed=2), values(5, dtype=torch.float32, seed=2)
    if backend in ("auto", "torch"):
        assert torch.equal(called(name, backend, double, (5,)), pytorchs(name, double, (5,)))
        try:
            right = pytorchs(name, double, (5,), (wide,))
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                called(name, backend, double, (5,), (wide,))
        else:
            assert torch.equal(called(name, backend, double, (5,), (wide,)), right)
        return
    with pytest.raises(TypeError, match=r"^x is torch.float64, must be torch.float32 or .* call x.to"):
        called(name, backend, double, (5,))
    remedy = r"call weight.to\(x.dtype\), or pass backend='torch'$"
    with pytest.raises(TypeError, match=rf"^weight is torch.bfloat16, must be torch.float32 like x: {remedy}"):
        called(name, backend, half.float(), (5,), (narrow,))
    with pytest.raises(TypeError, match=r"^residual is torch.float32, must be torch.bfloat16 like x: "):
        called(name, backend, half, (5,), (narrow,), half.float())


def test_auto_leaves_a_residual_that_is_to_be_broadcast_to_pytorch() -> None:
    x, residual = values(4, 3, 5), values(3, 5, seed=1)
    for name in NAMES:
        y, added = called(name, "auto", x, (5,), residual=residual)
        assert torch.equal(added, x + residual) and torch.equal(y, pytorchs(name, added, (5,)))


# ----------------------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@BY_NAME
@pytest.mark.parametrize("of_sum", [False, True], ids=["dout", "sum"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_nothing_is_copied_where_strides_allow(backend, name, layout, of_sum) -> None:
    of, dims = LAYOUTS[layout]
    x, residual = (of(values(64, 32, 2051, seed=seed)).detach().requires_grad_() for seed in (0, 1))
    row = x.shape[-dims:]
    one = torch.ones((), dtype=x.dtype, device="cuda").expand(x.shape)
    douts = (one, one) if of_sum else [of(values(64, 32, 2051, seed=seed)) for seed in (4, 5)]
    size = x.numel() * x.itemsize
    for turn in range(2):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y, added = called(name, backend, x, row, residual=residual)
        if turn:
            assert torch.cuda.max_memory_allocated() - before <= 2 * size + SLACK
        gradients = torch.autograd.grad((y, added), (x, residual), douts)
        if turn:
            assert torch.cuda.max_memory_allocated() - before <= 3 * size + SLACK
        del y, added, gradients


@ALL
@BY_NAME
def test_the_host_waits_for_nothing(backend, name) -> None:
    x, residual = (values(64, 300, requires_grad=True, seed=seed) for seed in (0, 1))
    y, dout = values(4, 5, 64, requires_grad=True), values(64, 300, seed=4)
    affine = weights(name, (300,), requires_grad=True)

    def step():
        out, added = called(name, backend, x, (300,), affine, residual)
        torch.autograd.grad((out, added), (x, residual, *affine), (dout, dout))
        torch.autograd.grad(called(name, backend, y, (5, 64)).sum(), y)
        with torch.no_grad():
            called(name, backend, x, (300,), affine)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["cuda"])  # a function in Python is told what wants gradients, not what asks
@BY_NAME
def test_gradients_of_weights_alone_take_no_memory_of_xs_size(backend, name) -> None:
    x, dout = values(4096, 4096), values(4096, 4096, seed=4)
    affine = weights(name, (4096,), requires_grad=True)
    for wants in (False, True):
        y = called(name, backend, x.requires_grad_(wants), (4096,), affine)
        for asked in (affine, *((each,) for each in affine)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(y, asked, dout, retain_graph=True)
            # Sums of a share of the rows each, of which there are a few to an SM.
            assert torch.cuda.max_memory_allocated() - before <= x.nbytes / 2


@OURS
@BY_NAME
def test_calls_keep_no_tensor_alive(backend, name) -> None:
    memory = []
    for _ in range(3):
        x, residual = (values(56, 4096, requires_grad=True, seed=seed) for seed in (0, 1))
        affine = weights(name, (4096,), requires_grad=True)
        y, added = called(name, backend, x, (4096,), affine, residual)
        (y * added).sum().backward()
        del x, residual, affine, y, added
        memory.append(torch.cuda.memory_allocated())
    assert memory[2] <= memory[0]  # the first call may keep what all later ones use


@OURS
@BY_NAME
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradients_of_weights_alone_need_no_dx(backend, name, dims, dtype) -> None:
    x = values(4096, 16, 256, dtype=dtype)
    row = x.shape[-dims:]
    for _ in range(2):  # the first call may keep what later ones use
        affine = weights(name, row, dtype, requires_grad=True)
        y, dy = getattr(kernel_twins, name)(x, row, *affine, backend=backend), values(*x.shape, dtype=dtype, seed=4)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = torch.autograd.grad(y, affine, dy)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < x.nbytes / 2
    wide = [each.detach().double().requires_grad_() for each in affine]
    right = getattr(torch.nn.functional, name)(x.double(), row, *wide)
    for each, exact in zip(found, torch.autograd.grad(right, wide, dy.double()), strict=True):
        torch.testing.assert_close(each.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# Registrations, derivatives, transforms
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@BY_NAME
def test_the_operators_are_what_pytorch_expects(backend, name) -> None:
    for dims, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        x, residual = (values(4, 5, 64, dtype=dtype, requires_grad=True, seed=seed) for seed in (0, 1))
        row = list(x.shape[-dims:])
        affine = weights(name, row, dtype, requires_grad=True)
        torch.library.opcheck(operator(name, backend), (x, row, *affine, 1e-5))
        torch.library.opcheck(operator(f"add_{name}", backend), (x, residual, row, *affine, 1e-5))
        statistics = [torch.ones(x.shape[:-dims], device="cuda") for _ in affine]
        backward, sums = operator(f"{name}_backward", backend), [True for _ in affine]
        given = (x.detach(), residual.detach(), *statistics, affine[0].detach(), x.detach())
        for x_grad in (False, True):
            torch.library.opcheck(backward, (*given, x_grad, *sums))


def by_definition(name: str, x: Any, shape: Any, affine: Any, residual: Any) -> Any:
    """In operations with any number of derivatives."""
    added = x + residual
    along = tuple(range(-len(shape), 0))
    y = added - added.mean(along, keepdim=True) if name == "layer_norm" else added
    y = y * (y.square().mean(along, keepdim=True) + EPS[name]).rsqrt() * affine[0]
    return y + affine[1] if name == "layer_norm" else y, added


@OURS
@BY_NAME
def test_second_derivatives(backend, name) -> None:
    for shape, dims in (((9, 33), 1), ((3, 20, 4), 2)):
        row = shape[-dims:]
        x, residual, dy, da = (
            values(*shape, dtype=torch.float32, requires_grad=True, seed=seed) for seed in (0, 1, 4, 5)
        )
        affine = weights(name, row, torch.float32, requires_grad=True)
        given = (x, residual, *affine)
        wide = [each.detach().double().requires_grad_() for each in (*given, dy, da)]
        found = []
        for call, inputs, douts in (
            (lambda *a: called(name, backend, *a), given, (dy, da)),
            (lambda *a: by_definition(name, *a), wide[:-2], wide[-2:]),
        ):
            results = call(inputs[0], row, inputs[2:], inputs[1])
            firsts = torch.autograd.grad(results, inputs, douts, create_graph=True)
            summed = sum(each.square().sum() for each in firsts)
            seconds = torch.autograd.grad(summed, (*inputs[:3], *douts))
            found.append([each.double() for each in (*firsts, *seconds)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


@OURS
@BY_NAME
def test_compiled_without_a_break(backend, name) -> None:
    """By Inductor, for any number of rows, and what PyTorch fuses before and behind."""
    torch.compiler.reset()

    def function(call, x, residual, *affine):
        y, added = call(x * 2, x.shape[-1:], affine, residual)
        return y.relu() + added

    compiled = torch.compile(
        lambda *given: function(lambda *a: called(name, backend, *a), *given), fullgraph=True, dynamic=True
    )
    for shape in ((64, 96), (130, 96), (70, 300)):
        x, residual = (values(*shape, dtype=torch.float32, requires_grad=True, seed=seed) for seed in (0, 1))
        given = (x, residual, *weights(name, shape[1:], torch.float32, requires_grad=True))
        out, right = compiled(*given), function(lambda *a: pytorchs(name, *a), *given)
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
        gradients = (torch.autograd.grad(each.square().sum(), given) for each in (out, right))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


def test_auto_is_compiled_without_a_break() -> None:
    torch.compiler.reset()
    module = kernel_twins.nn.LayerNorm(96, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(module, fullgraph=True)
    x = values(64, 96, requires_grad=True)
    torch.testing.assert_close(compiled(x), pytorchs("layer_norm", x, (96,), (module.weight, module.bias)))


@OURS
def test_graph_trees(backend) -> None:
    torch.compiler.reset()
    x, residual = values(72, 4096), values(72, 4096, seed=1)
    affine = weights("layer_norm", (4096,))

    def function(x, residual):
        y, added = called("layer_norm", backend, x, (4096,), affine, residual)
        return called("rms_norm", backend, y, (4096,), affine[:1], added)

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    right = function(x, residual)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert all(
            torch.equal(each.clone(), expected) for each, expected in zip(compiled(x, residual), right, strict=True)
        )


@ALL
@BY_NAME
@pytest.mark.parametrize(
    "shape", [(64, 256), (37, 5003), (8, 65_536), (300, 65_536), (300, 50_257), (3, 262_147), (3, 2_000_003)], ids=str
)
def test_captured_and_replayed_with_gradients(backend, name, shape) -> None:
    x, residual = (values(*shape, requires_grad=True, seed=seed) for seed in (0, 1))
    douts = [values(*shape, seed=seed) for seed in (4, 5)]
    affine = weights(name, shape[1:], requires_grad=True)

    def step():
        out = called(name, backend, x, shape[1:], affine, residual)
        return *(each.detach() for each in out), *torch.autograd.grad(out, (x, residual, *affine), douts)

    right = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(3):
        for result in results:
            result.zero_()
        graph.replay()
        assert all(torch.equal(result, each) for result, each in zip(results, right, strict=True))


@ALL
@BY_NAME
@BY_RESIDUAL
def test_autocast_changes_dtypes_as_pytorchs(backend, name, adds) -> None:
    """layer_norm is widened, also where weights alone are half; rms_norm is left as it is."""
    mixed = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)] if name == "layer_norm" else []
    for dtype, of_weights in (*((each, each) for each in DTYPES), *mixed):
        x = values(33, 257, dtype=dtype, requires_grad=True)
        residual = values(33, 257, dtype=dtype, requires_grad=True, seed=1) if adds else None
        affine = weights(name, (257,), of_weights, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = tensors(called(name, backend, x, (257,), affine, residual))
            right = tensors(pytorchs(name, x, (257,), affine, residual))
        assert [each.dtype for each in out] == [each.dtype for each in right]
        half = out[0].dtype != torch.float32
        torch.testing.assert_close(out, right, rtol=2e-2 if half else 1e-5, atol=2e-2 if half else 1e-5)
        wanted = present(x, residual, *affine)
        got, expected = (torch.autograd.grad(each[0].square().sum(), wanted) for each in (out, right))
        assert [each.dtype for each in got] == [each.dtype for each in wanted]
        for each, other in zip(got, expected, strict=True):
            assert (each - other).float().norm() <= 2e-2 * other.float().norm()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            assert tensors(called(name, backend, x, (257,), affine, residual))[0].dtype == right[0].dtype


@ALL
@BY_NAME
@BY_RESIDUAL
def test_float32_weights_are_read_in_the_dtype_of_x(backend, name, adds) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = values(33, 257, dtype=dtype, requires_grad=True)
        residual = values(33, 257, dtype=dtype, requires_grad=True, seed=1) if adds else None
        narrow = weights(name, (257,), dtype)
        wide = [each.float().requires_grad_() for each in narrow]
        out = tensors(called(name, backend, x, (257,), wide, residual))
        read = wide if (backend, name) == ("torch", "rms_norm") else narrow
        right = tensors(called(name, backend, x, (257,), read, residual))
        assert all(torch.equal(*each) for each in zip(out, right, strict=True))
        assert [each.dtype for each in torch.autograd.grad(out[0].sum(), wide)] == [torch.float32] * len(wide)


@ALL
def test_an_offset_is_added_to_the_weight_of_rms_norm(backend) -> None:
    for dtype, of_weight in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, None)):
        x = values(33, 257, dtype=dtype)
        weight = values(257, dtype=of_weight or torch.float32, requires_grad=True, seed=2)
        y = kernel_twins.rms_norm(x, 257, weight, 1e-6, offset=1.0, backend=backend)
        right = torch.nn.functional.rms_norm(x.double(), (257,), weight.double() + 1, 1e-6)
        assert y.dtype == dtype
        near = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y.double(), right, rtol=near, atol=near)
        (dweight,) = torch.autograd.grad(y.sum(), weight)
        assert dweight.dtype == weight.dtype


@ALL
@BY_NAME
@pytest.mark.parametrize(("shape", "in_dim", "dims"), [((9, 33), 0, 1), ((4, 33, 9), 2, 1), ((4, 5, 6, 7), 1, 2)])
def test_batched(backend, name, shape, in_dim, dims) -> None:
    x, residual = (values(*shape, dtype=torch.float32, requires_grad=True, seed=seed) for seed in (0, 1))
    row = [size for dim, size in enumerate(shape) if dim != in_dim][-dims:]
    affine = weights(name, row, torch.float32, requires_grad=True)
    several = tuple(torch.stack([each * i for i in range(shape[in_dim])]) for each in affine)
    for of_affine, given in ((None, affine), (0, several)):

        def batched(function, of_affine=of_affine, given=given):
            def call(x, residual, *affine):
                return function(name, x, row, affine, residual)

            return torch.func.vmap(call, in_dims=(in_dim, in_dim, *(of_affine for _ in given)))(x, residual, *given)

        out = batched(lambda name, *given: called(name, backend, *given))
        right = batched(pytorchs)
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
        wanted = (x, residual, *affine)
        gradients = (torch.autograd.grad((each[0] * each[1]).sum(), wanted, retain_graph=True) for each in (out, right))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@BY_NAME
def test_derivatives_of_torch_func_are_pytorchs_by_auto(name) -> None:
    x = values(3, 7, dtype=torch.float32)
    got, right = (
        torch.func.grad(lambda x, function=function: function(x).square().sum())(x)
        for function in (lambda x: called(name, "auto", x, (7,)), lambda x: pytorchs(name, x, (7,)))
    )
    torch.testing.assert_close(got, right)


@OURS
@BY_NAME
def test_derivatives_of_torch_func_are_refused_and_not_lost(backend, name) -> None:
    x = values(9, 33, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"no derivative for torch.func's grad and vjp: pass backend='torch'"):
        torch.func.grad(lambda x: called(name, backend, x, (33,)).sum())(x)
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda x: called(name, backend, x, (33,)), (x,), (x,))


# ----------------------------------------------------------------------------------------------------------------------
# Streams, devices, modules, the choice
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@BY_NAME
@pytest.mark.parametrize("shape", [(512, 4096), (3, 262_144), (5, 2_000_003)], ids=str)
def test_streams_run_at_once(backend, name, shape) -> None:
    affine = weights(name, shape[1:], requires_grad=True)
    given = [values(*shape, requires_grad=True, seed=seed) for seed in range(2)]
    dout = values(*shape, seed=4)

    def step(x):
        y = called(name, backend, x, shape[1:], affine)
        return y.detach(), *torch.autograd.grad(y, (x, *affine), dout)

    expected = [step(x) for x in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, x in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(step(x))
        torch.cuda.synchronize()
        assert all(map(torch.equal, itertools.chain(*found), itertools.chain(*expected)))


@ALL
@BY_NAME
def test_the_current_device_need_not_be_xs(backend, name) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU alone")
    x = values(33, 257).to("cuda:1").requires_grad_()
    affine = [each.to("cuda:1").requires_grad_() for each in weights(name, (257,))]
    with torch.cuda.device(0):
        y = called(name, backend, x, (257,), affine)
        torch.testing.assert_close(y, pytorchs(name, x, (257,), affine))
        gradients = torch.autograd.grad(y, (x, *affine), torch.ones_like(y))
        assert all(each.device == x.device for each in gradients)


@OURS
@BY_NAME
def test_signs_that_are_yet_to_be_changed(backend, name) -> None:
    x = torch.view_as_complex(values(33, 40, 2, dtype=torch.float32)).conj().imag
    assert x.is_neg()
    y, added = called(name, backend, x, (40,), residual=x)
    torch.testing.assert_close((y, added), pytorchs(name, x, (40,), residual=x))


@OURS
@BY_NAME
def test_tensors_off_the_gpu_are_refused(backend, name) -> None:
    with pytest.raises(ValueError, match=r"^x is on cpu, must be on a CUDA device .* call x.cuda\(\)"):
        called(name, backend, torch.ones(3, 5), (5,))
    with pytest.raises(ValueError, match=r"^weight is on cpu, must be on cuda:0 like x: call weight.to\(x.device\)$"):
        called(name, backend, values(3, 5), (5,), (torch.ones(5, dtype=torch.bfloat16),))


@ALL
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_module_learns_as_torch_nns_does(backend, name) -> None:
    ours = getattr(kernel_twins.nn, name)(1000, device="cuda", backend=backend)
    right = getattr(torch.nn, name)(1000, device="cuda")
    right.load_state_dict(ours.state_dict())
    x, target = (values(64, 1000, dtype=torch.float32, seed=seed) for seed in (0, 1))
    for module in (ours, right):
        optimizer = torch.optim.SGD(module.parameters(), lr=10.0)
        for _ in range(5):
            optimizer.zero_grad()
            (module(x) - target).square().mean().backward()
            optimizer.step()
    ours.load_state_dict(ours.state_dict())
    for parameter, expected in zip(ours.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x, x), (right(x + x), x + x), rtol=1e-4, atol=1e-5)


@BY_NAME
def test_auto_takes_what_was_measured(name) -> None:
    if torch.cuda.get_device_name() != "NVIDIA H100 80GB HBM3":
        pytest.skip("no measurements are committed for this GPU")
    from kernel_twins.functional import expected

    for m, n in ((4096, 1024), (300, 1000), (16, 2**20)):
        x, weight = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, n), (n,)))
        best = expected.ordered("h100-sxm", name, expected.rows(m, n, n, 2, ["residual.yes"]), False)[0]
        assert norm._choose(name, x, (n,), (weight,), x) == best

"""The kernels that sum a backward pass's columns alone: in Triton's interpreter without a GPU, compiled on one.

Interpreting is decided when a kernel is imported, for the whole process, so that test runs in one of its own
(forks.py).
"""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402
from kernel_twins.ops.dropout import shared  # noqa: E402
from tests import forks  # noqa: E402

P, SEED, OFFSET = 0.3, 2**63 + 11, 2**40 + 8
SMALL = [(1, 1), (5, 7), (0, 3), (300, 33), (70, 600), (2000, 3)]  # of one strip and several, one chunk and several
LARGE = [*SMALL, (4096, 4096), (3, 262_147), (100_003, 5), (2101, 2203)]
LAYOUTS = {"contiguous": (0, 0), "spaced": (8, 0), "pitched": (3, 0), "offset": (3, 1)}  # how far beyond, from where
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(shape: tuple[int, int], seed: int, dtype: Any, device: str, layout: str = "contiguous") -> Any:
    (m, n), (beyond, first) = shape, LAYOUTS[layout]
    made = torch.randn(m, n + beyond, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return made[:, first : first + n]


def assert_near(found: Any, right: Any, terms: Any) -> None:
    """Rounded once, to nearest, from an fp32 sum of such terms; fp16 has no place below its smallest number."""
    about = torch.finfo(found.dtype)
    rounding = about.eps / 2 * right.abs().clamp_min(about.smallest_normal)
    bound = rounding + 4 * torch.finfo(torch.float32).eps * terms
    assert bool(((found.double() - right).abs() <= bound).all())


def norms_are_right(shape: tuple[int, int], dtype: Any, device: str, layout: str = "contiguous") -> None:
    """Both norms' sums, together and each alone, within the bounds of float64's."""
    weights = importlib.import_module("kernel_twins._triton.norm.layer_norm_backward.weights").norm_weights
    dout, x = (matrix(shape, seed, dtype, device, layout) for seed in (0, 1))
    mean, rstd = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(2)).to(device)
    for centers in (mean, None):
        xhat = (x.double() - (0.0 if centers is None else centers.double()[:, None])) * rstd.double()[:, None]
        right = (dout.double() * xhat).sum(0), dout.double().sum(0)
        terms = (dout.double() * xhat).abs().sum(0), dout.double().abs().sum(0)
        both = torch.full((2, shape[1]), math.nan, dtype=dtype, device=device)
        weights(dout, x, centers, rstd, *both)
        for each in zip(both, right, terms, strict=True):
            assert_near(*each)
        for at in (0, 1):
            alone = torch.full_like(both[at], math.nan)
            weights(dout, x, centers, rstd, *((alone, None) if at == 0 else (None, alone)))
            assert_near(alone, right[at], terms[at])


def biases_are_right(
    shape: tuple[int, int], activation: str, dtype: Any, device: str, layout: str = "contiguous", p: float = P
) -> None:
    """dropout_add's sum, with a bias and without, of a state that the host knows and of one on the GPU."""
    compute = importlib.import_module("kernel_twins._triton.dropout.dropout_add_backward.bias").dropout_add_bias
    dout, x = (matrix(shape, seed, dtype, device, layout) for seed in (0, 1))
    kept = shared.kept(shape, slice(0, shape[0]), torch.device(device), p=p, seed=SEED, offset=OFFSET)
    words = torch.tensor([SEED - 2**64, OFFSET], device=device)
    for shift in (matrix((1, shape[1]), 2, dtype, device)[0], None):
        given = (None, None) if activation == "none" else (x, shift)
        z = x.double() if shift is None else (x.float() + shift.float()).double()
        z.requires_grad_()
        (slope,) = torch.autograd.grad(ACTIVATIONS[activation](z).sum(), z)
        dz = torch.where(kept, dout.double() * slope * shared.scale(p), 0.0)
        # A slope errs by up to 1e-6 of its own, which is 0 where terms take each other away.
        terms = torch.where(kept, dout.double().abs() * shared.scale(p), 0.0).sum(0) * 4
        for state in ({"seed": SEED, "offset": OFFSET}, {"seed": words, "offset": None}):
            dbias = torch.full((shape[1],), math.nan, dtype=dtype, device=device)
            compute(dout, *given, dbias, p=p, activation=activation, **state)
            assert_near(dbias, dz.sum(0), terms)


def test_sums_are_right_when_interpreted() -> None:
    forks.interpreted("tests.lib.test_triton_sums", "interpret")


def interpret() -> None:
    for shape in SMALL:
        norms_are_right(shape, torch.float32, "cpu")
        biases_are_right(shape, "none", torch.float32, "cpu")
    for layout in LAYOUTS:
        norms_are_right((37, 300), torch.float16, "cpu", layout)
        biases_are_right((37, 300), "gelu", torch.float16, "cpu", layout)
    for activation in ACTIVATIONS:
        biases_are_right((37, 65), activation, torch.float32, "cpu")
    norms_are_right((33, 65), torch.bfloat16, "cpu")
    biases_are_right((33, 65), "silu", torch.bfloat16, "cpu")
    for p in (0.0, 1.0):
        biases_are_right((33, 65), "relu", torch.float32, "cpu", p=p)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_norms(dtype, layout) -> None:
    for shape in (*LARGE, *LARGE):  # what was compiled is launched again
        norms_are_right(shape, dtype, "cuda", layout)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sums_of_dropout(activation, layout) -> None:
    for shape, dtype in itertools.product(LARGE, DTYPES):
        biases_are_right(shape, activation, dtype, "cuda", layout)


@pytest.mark.gpu
def test_sums_of_rows_past_two_to_the_31_elements(alone) -> None:
    weights = importlib.import_module("kernel_twins._triton.norm.layer_norm_backward.weights").norm_weights
    compute = importlib.import_module("kernel_twins._triton.dropout.dropout_add_backward.bias").dropout_add_bias
    m, n = 2**31 // 1024 + 40, 1024
    dout = torch.zeros(m, n, dtype=torch.bfloat16, device="cuda")
    dout[-1], dout[0] = 1, 2
    rstd = torch.ones(m, device="cuda")
    dweight, dbias = torch.empty(2, n, dtype=torch.bfloat16, device="cuda")
    weights(dout, dout, None, rstd, dweight, dbias)
    assert bool((dweight == 5).all()) and bool((dbias == 3).all())
    kept = shared.kept((m, n), slice(m - 1, m), dout.device, p=P, seed=SEED, offset=OFFSET)
    dout[0] = 0
    compute(dout, None, None, dbias, p=P, activation="none", seed=SEED, offset=OFFSET)
    assert torch.equal(dbias != 0, kept[0])


@pytest.mark.gpu
def test_sums_of_more_rows_than_32_bits_count() -> None:
    weights = importlib.import_module("kernel_twins._triton.norm.layer_norm_backward.weights").norm_weights
    m = 2**32 + 5
    dout = torch.ones(1, 2, dtype=torch.bfloat16, device="cuda").expand(m, 2)
    rstd = torch.ones(1, device="cuda").expand(m)  # nobody reads it for a bias alone
    dbias = torch.empty(2, dtype=torch.bfloat16, device="cuda")
    weights(dout, dout, None, rstd, None, dbias)
    assert dbias.tolist() == [2.0**32, 2.0**32]


@pytest.mark.gpu
def test_many_runs_agree_bit_by_bit() -> None:
    weights = importlib.import_module("kernel_twins._triton.norm.layer_norm_backward.weights").norm_weights
    dout, x = (matrix((8192, 1024), seed, torch.bfloat16, "cuda") for seed in (0, 1))
    mean, rstd = torch.randn(2, 8192, device="cuda")
    first, again = torch.empty(2, 2, 1024, dtype=torch.bfloat16, device="cuda")
    weights(dout, x, mean, rstd, *first)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        weights(dout, x, mean, rstd, *again)
        differing += (again != first).any()
    assert differing.item() == 0

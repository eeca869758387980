"""Products at sizes that v19's tiles fit, on a GPU: every width of a tile, in all layouts, whole rows and odd ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS, load  # noqa: E402
from kernel_twins.harness.check import check, generator  # noqa: E402
from kernel_twins.harness.load import extension  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

pytestmark = pytest.mark.gpu

# Products of a and b along K, and what v19 should take for them on an H100 and on an H200.
SIZES = {
    "128 x 224": (1916, 1592, 264),
    "128 x 176": (985, 2584, 264),
    "128 x 160": (2401, 1928, 208),
    "128 x 192": (1538, 1336, 144),
    "128 x 128": (1226, 1192, 520),
    "64 x 128": (393, 1264, 136),
    "64 x 64": (241, 880, 136),
}
# Products with tiles that are left over after full rounds, and larger ones of each kind of row.
MORE = (
    (6784, 904, 1872),
    (1760, 3808, 11_248),
    (5384, 200, 4304),
    (1584, 1519, 11_792),
    (5384, 199, 4304),
    (248, 7832, 8632),
    (272, 7568, 760),
    (272, 7567, 760),
    (1584, 3023, 104),
)
LAYOUTS: tuple[dict[str, str], ...] = ({}, {"a": "col"}, {"b": "col"}, {"a": "col", "b": "col"})
LINEARS = ({"act": "none"}, {"act": "gelu"}, {"act": "silu", "w": "col"})
STEPS = {"matmul_bf16": "v19_fitted_tiles", "linear": "v03_fitted_tiles"}
BY_SIZES = pytest.mark.parametrize("sizes", [*SIZES.values(), *MORE], ids="{0[0]}x{0[1]}x{0[2]}".format)
BY_DTYPE = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


def loaded(name: str) -> Callable[..., None]:
    step = OPS[name].step(STEPS[name])
    if not step.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step.name} needs compute capability {step.arch}")
    return load(name, step.name, "cuda")


@BY_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout) or "rows")
@BY_SIZES
@pytest.mark.parametrize("odd", [0, 1, 3], ids=["as-it-is", "one-less", "odd-k"])
def test_a_product_is_right(sizes: tuple[int, int, int], layout: dict[str, str], dtype: str, odd: int) -> None:
    m, n, k = sizes
    case = Case.of(m, n - odd % 2, k + (odd == 3), dtype=dtype, **layout)
    verdict = check(OPS["matmul_bf16"], loaded("matmul_bf16"), case)
    assert verdict.ok, verdict.reason


@BY_DTYPE
@pytest.mark.parametrize("variant", LINEARS, ids=lambda variant: "-".join(variant.values()))
@BY_SIZES
@pytest.mark.parametrize("odd", [0, 1], ids=["as-it-is", "one-less"])
def test_a_layer_is_right(sizes: tuple[int, int, int], variant: dict[str, str], dtype: str, odd: int) -> None:
    m, n, k = sizes
    case = Case.of(m, n - odd, k, dtype=dtype, **variant)
    verdict = check(OPS["linear"], loaded("linear"), case)
    assert verdict.ok, verdict.reason


@BY_SIZES
def test_equal_calls_give_the_same_bits(sizes: tuple[int, int, int]) -> None:
    op, call = OPS["matmul_bf16"], loaded("matmul_bf16")
    case = Case.of(*sizes, dtype="bf16", b="col")
    a, b = op.inputs(case, generator(case, "cuda"))
    outs = [torch.full(sizes[:2], float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    for out in outs:
        call(a, b, out=out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("tile", "sizes"), SIZES.items())
def test_the_tile_is_told(tile: str, sizes: tuple[int, int, int]) -> None:
    loaded("matmul_bf16")
    if torch.cuda.get_device_properties().multi_processor_count != 132:
        pytest.skip("the sizes fit a GPU of 132 SMs")
    m, n, k = sizes
    a, b = (torch.empty(lines, k, dtype=torch.bfloat16, device="cuda") for lines in (m, n))
    assert tile in extension().product_configuration(a, b.t())


@BY_DTYPE
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("odd", [0, 1], ids=["as-it-is", "one-less"])
@pytest.mark.parametrize("tile", ["128 x 224", "128 x 176", "128 x 160", "64 x 128", "split"])
def test_the_gradient_knows_what_the_activation_was_applied_to(tile: str, odd: int, has_bias: bool, dtype: str) -> None:
    """GELU's slope at it decides every element of dz, the gradient of the bias and of both operands."""
    loaded("linear")
    m, n, k = SIZES.get(tile, MORE[2])
    n -= odd
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    sizes = ((m, k), (n, k), (n,))[: 2 + has_bias]
    given = [torch.randn(size, device="cuda", dtype=kind) for size in sizes]
    given[1] *= k**-0.5
    dout = torch.randn(m, n, device="cuda", dtype=kind)
    ours = [tensor.clone().requires_grad_() for tensor in given]
    x, weight, *rest = ours
    result = kernel_twins.linear(x, weight, rest[0] if has_bias else None, activation="gelu", backend="cuda")
    wide = [tensor.double().requires_grad_() for tensor in given]
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(*wide))
    assert (result.double() - expected).abs().max() <= 2.0**-6 * expected.abs().max()
    for got, right in zip(
        torch.autograd.grad(result, ours, dout), torch.autograd.grad(expected, wide, dout.double()), strict=True
    ):
        rows = (got.double() - right).flatten(1 if got.dim() > 1 else 0)
        assert (rows.norm(dim=-1) <= 0.02 * right.flatten(1 if got.dim() > 1 else 0).norm(dim=-1)).all()

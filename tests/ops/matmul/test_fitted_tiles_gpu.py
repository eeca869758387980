"""Products at sizes that v19's tiles fit, on a GPU: every width of a tile, in all layouts, whole rows and odd ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load  # noqa: E402
from kernel_twins.harness.check import check, generator  # noqa: E402
from kernel_twins.harness.load import extension  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

pytestmark = pytest.mark.gpu

# Sizes at which a tile should need far less time than any other, on a GPU of 132 SMs.
SIZES = {
    "128 x 224": (1916, 1592, 264),
    "128 x 176": (985, 2584, 264),
    "128 x 160": (2401, 1928, 208),
    "128 x 192": (1538, 1336, 144),
    "128 x 128": (1226, 1192, 520),
    "64 x 128": (393, 1264, 136),
    "64 x 64": (241, 880, 136),
    "128 x 256": (248, 7832, 8632),
    "split by": (552, 2248, 6832),
}
LAYOUTS: tuple[dict[str, str], ...] = ({}, {"a": "col"}, {"b": "col"}, {"a": "col", "b": "col"})
LINEARS = ({"act": "none"}, {"act": "gelu"}, {"act": "silu", "w": "col"})


def steps(name: str) -> str:
    step = OPS[name].steps_of("cuda")[-1]
    if not step.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step.name} needs compute capability {step.arch}")
    return step.name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout) or "rows")
@pytest.mark.parametrize("sizes", SIZES.values(), ids="{0[0]}x{0[1]}x{0[2]}".format)
@pytest.mark.parametrize("odd", [0, 1, 3], ids=["whole", "odd", "odd-k"])
def test_a_product_is_right(sizes: tuple[int, int, int], layout: dict[str, str], dtype: str, odd: int) -> None:
    m, n, k = sizes
    case = Case.of(m, n - odd % 2, k + (odd == 3), dtype=dtype, **layout)
    verdict = check(OPS["matmul_bf16"], load("matmul_bf16", steps("matmul_bf16"), "cuda"), case)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("variant", LINEARS, ids=lambda variant: "-".join(variant.values()))
@pytest.mark.parametrize("sizes", SIZES.values(), ids="{0[0]}x{0[1]}x{0[2]}".format)
@pytest.mark.parametrize("odd", [0, 1], ids=["whole", "odd"])
def test_a_layer_is_right(sizes: tuple[int, int, int], variant: dict[str, str], dtype: str, odd: int) -> None:
    m, n, k = sizes
    case = Case.of(m, n - odd, k, dtype=dtype, **variant)
    verdict = check(OPS["linear"], load("linear", steps("linear"), "cuda"), case)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("sizes", SIZES.values(), ids="{0[0]}x{0[1]}x{0[2]}".format)
def test_equal_calls_give_the_same_bits(sizes: tuple[int, int, int]) -> None:
    op, call = OPS["matmul_bf16"], load("matmul_bf16", steps("matmul_bf16"), "cuda")
    case = Case.of(*sizes, dtype="bf16", b="col")
    a, b = op.inputs(case, generator(case, "cuda"))
    outs = [torch.full(sizes[:2], float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    for out in outs:
        call(a, b, out=out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("tile", "sizes"), SIZES.items())
def test_the_tile_is_told(tile: str, sizes: tuple[int, int, int]) -> None:
    steps("matmul_bf16")
    if torch.cuda.get_device_properties().multi_processor_count != 132:
        pytest.skip("the sizes fit a GPU of 132 SMs")
    m, n, k = sizes
    a, b = (torch.empty(lines, k, dtype=torch.bfloat16, device="cuda") for lines in (m, n))
    assert tile in extension().product_configuration(a, b.t())


def test_a_layers_argument_of_the_activation_is_kept_for_the_gradient() -> None:
    import kernel_twins

    steps("linear")
    m, n, k = SIZES["128 x 224"]
    for odd in (0, 1):
        x, weight, bias = (
            torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for size in ((m, k), (n - odd, k), (n - odd,))
        )
        dout = torch.randn(m, n - odd, device="cuda", dtype=torch.bfloat16)
        got = torch.autograd.grad(
            kernel_twins.linear(x, weight, bias, activation="gelu", backend="cuda"), (x, weight, bias), dout
        )
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
        layer = torch.nn.functional.gelu(torch.nn.functional.linear(*wide))
        for gradient, expected in zip(got, torch.autograd.grad(layer, wide, dout.double()), strict=True):
            assert (gradient.double() - expected).norm() <= 0.02 * expected.norm()

"""``out = activation(x @ weight.T + bias)`` for bf16 or fp16, accumulated in fp32: a linear layer, fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_twins.ops import baselines, ptx
from kernel_twins.ops.draws import product_sizes
from kernel_twins.ops.matmul import shared
from kernel_twins.spec import BACKENDS, ITEMSIZE, Case, Drawn, Op, Prediction, Reference, Step
from kernel_twins.spec.chance import Draws

if TYPE_CHECKING:
    from torch import Generator, Tensor

_ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")  # those of kernel_twins.ops.activations

_DTYPES = ("bf16", "fp16")


def _inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """x: [M, K], weight: [N, K] (``w.col`` makes it column-major), bias: [N]. Sums are of unit variance."""
    from kernel_twins.ops.tensors import normal

    m, n, k = case.shape
    x = normal(case, (m, k), generator)
    weight = normal(case, (k, n), generator).t() if case.get("w") == "col" else normal(case, (n, k), generator)
    if case.get("values") == "hostile":
        shared.weigh(x, weight.t())
    return x, weight.mul_(max(1, k) ** -0.5), normal(case, (n,), generator)


def _options(case: Case) -> dict[str, Any]:
    return {"activation": case.get("act", "none")}


def _reference(case: Case, inputs: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, Tensor]:
    """No activation's slope exceeds 1.13 in magnitude, so an error of the sum grows by at most that factor."""
    from torch.nn import functional

    from kernel_twins.ops.activations import ACTIVATIONS
    from kernel_twins.ops.tensors import chain

    x, weight, bias = (tensor.double() for tensor in (inputs[0][rows], *inputs[1:]))
    pre = functional.linear(x, weight, bias)
    terms = x.abs() @ weight.abs().t() + bias.abs() + chain(x.shape[1]) * pre.abs()
    return ACTIVATIONS[case.get("act", "none")](pre), 1.13 * terms


def _check(x: Tensor, weight: Tensor, bias: Tensor, *, out: Tensor, activation: str = "none") -> None:
    """x: [M, K], weight: [N, K], any strides; bias: [N], out: [M, N], contiguous; one dtype, one device."""
    from kernel_twins.ops import tensors

    for name, tensor, rank in (("x", x, 2), ("weight", weight, 2), ("bias", bias, 1), ("out", out, 2)):
        tensors.require_dtype(name, tensor, *_DTYPES)
        tensors.require_same_dtype(name, tensor, "x", x)
        tensors.require_rank(name, tensor, rank)
        tensors.require_device(name, tensor, "x", x)
    tensors.require_shape("weight", weight, (weight.shape[0], x.shape[1]), "its columns are x's")
    tensors.require_shape("bias", bias, (weight.shape[0],), "one element for each row of weight")
    tensors.require_shape("out", out, (x.shape[0], weight.shape[0]), "x's rows by weight's rows")
    tensors.require_contiguous("bias", bias)
    tensors.require_contiguous("out", out)
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        tensors.require_apart(out, name, tensor)
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"activation is '{activation}', must be none, relu, gelu, gelu_tanh or silu: apply others to the result"
        )


def _bytes(case: Case) -> int:
    return shared.bytes_moved(case) + ITEMSIZE[case.dtype] * case.shape[1]


def _torch(x: Tensor, weight: Tensor, bias: Tensor, *, out: Tensor, activation: str = "none") -> None:
    """F.linear and the activation; the last operation writes ``out``."""
    import torch

    if activation == "none":
        torch.addmm(bias, x, weight.t(), out=out)
        return
    pre = torch.nn.functional.linear(x, weight, bias)
    if activation == "relu":
        torch.ops.aten.relu.out(pre, out=out)
    elif activation == "silu":
        torch.ops.aten.silu.out(pre, out=out)
    else:
        torch.ops.aten.gelu.out(pre, approximate="tanh" if activation == "gelu_tanh" else "none", out=out)


def _function(x: Tensor, weight: Tensor, bias: Tensor, *, activation: str = "none") -> Tensor:
    from torch.nn import functional

    from kernel_twins.ops.activations import ACTIVATIONS

    return ACTIVATIONS[activation](functional.linear(x, weight, bias))


def _operands(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """x and weight.T, the operands of the bare product."""
    return x, weight.t()


def _draw(draws: Draws) -> Drawn:
    variant = {"act": draws.deal("act", _ACTIVATIONS)}
    if draws.deal("layout", ("row", "row", "col")) == "col":
        variant["w"] = "col"
    return Drawn(Case.of(*product_sizes(draws), dtype=draws.deal("dtype", _DTYPES), **variant))


_SQUARE = (4_096, 4_096, 4_096)
_BENCH_CASES = (
    *(Case.of(*_SQUARE, dtype="bf16", act=activation) for activation in _ACTIVATIONS[1:]),
    Case.of(*_SQUARE, dtype="bf16"),
    *(
        Case.of(*shape, dtype="bf16", act="gelu")
        for shape in (
            (8_192, 8_192, 8_192),
            (4_096, 14_336, 4_096),
            (4_096, 4_096, 14_336),
            (64, 4_096, 4_096),
            (3_333, 5_555, 7_777),
        )
    ),
)
_PROFILE_CASE = Case.of(*_SQUARE, dtype="bf16", act="gelu")
_FEW = Case.of(64, 4_096, 4_096, dtype="bf16", act="gelu")
_FEWER = Case.of(16, 14_336, 4_096, dtype="bf16", act="gelu")
_FITTED = Case.of(1_024, 5_120, 4_096, dtype="bf16", act="gelu")

OP = Op(
    name="linear",
    family="matmul",
    chapter=6,
    title="Linear layer with its activation",
    summary="`out = activation(x @ weight.T + bias)` for bf16 or fp16 with fp32 sums: what an epilogue can hold.",
    rounds="The sum, before the activation; tensor cores add to it, and cut off what it has no places for.",
    inputs=_inputs,
    hostile=True,
    draw=_draw,
    outputs=shared.outputs,
    reference=_reference,
    check=_check,
    accepts=shared.accepts_of(*_DTYPES),
    options=_options,
    test_cases=tuple(
        Case.of(m, n, k, dtype=dtype, **variant)
        for dtype in _DTYPES
        for m, n, k, variant in (
            (0, 5, 7, {"act": "gelu"}),
            (5, 0, 7, {"act": "gelu"}),
            (5, 7, 0, {"act": "silu"}),
            (1, 1, 1, {}),
            *((136, 264, 72, {"act": activation}) for activation in _ACTIVATIONS[1:]),
            *((65, 67, 72, {"act": activation}) for activation in _ACTIVATIONS[1:]),
            (129, 127, 65, {"act": "gelu"}),
            (136, 264, 72, {"act": "gelu", "w": "col"}),
            (300, 200, 1_000, {}),
            (65, 66, 67, {"act": "relu", "offset": "1"}),
            (64, 64, 64, {"act": "gelu", "values": "inf"}),
            (64, 64, 64, {"act": "relu", "values": "nan"}),
            (64, 4_096, 4_096, {"act": "gelu_tanh"}),
            (40, 20_000, 64, {"act": "silu"}),
            (3, 128, 8_192, {"act": "gelu", "w": "col"}),
            (1_000, 5, 1_000, {"act": "relu"}),
            (2_101, 2_203, 135, {"act": "silu"}),
            (1_024, 768, 512, {}),
        )
    ),
    bench_cases=_BENCH_CASES,
    wide_cases=(_FEWER, _FITTED),
    headline_cases=(_PROFILE_CASE, Case.of(8_192, 8_192, 8_192, dtype="bf16", act="gelu")),
    size_axis=shared.SQUARES,
    profile_case=_PROFILE_CASE,
    ceiling="bf16",
    flops=shared.flops,
    bytes=_bytes,
    baselines={"torch": _torch, "compile": baselines.compiled_results(_function)},
    references={f"product_{backend}": Reference(backend, "matmul_bf16", _operands) for backend in BACKENDS},
    behind={"cuda": ("v03_fitted_tiles",), "triton": ("v02_few_rows",)},
    steps=(
        Step(
            name="v01_fused",
            predictions=(
                Prediction("time", "<=", 204, backends=("cuda",)),
                Prediction("time", "<=", 214, backends=("triton",)),
                Prediction("dram_bytes", "<=", 190, backends=("cuda",)),
                Prediction("instructions", "==", 33, tolerance=0.1, backends=("cuda",)),
                Prediction("tensor_pipe", ">=", 83, backends=("cuda",)),
            ),
            arch="==9.0a",
            promises={90: (ptx.WGMMA, ptx.TMA_LOAD, ptx.TMA_STORE, ptx.EARLY)},
        ),
        Step(
            name="v02_few_rows",
            predictions=(
                Prediction("time", "<=", 0.9, relative=True, case=_FEW, backends=("cuda",)),
                Prediction("dram_bytes", "==", 1.0, relative=True, tolerance=0.1, case=_FEW, backends=("cuda",)),
            ),
            arch="==9.0a",
            wide=True,
            profile_case={"cuda": _FEW, "triton": _FEWER},
            promises={90: (ptx.WGMMA, ptx.TMA_LOAD, ptx.TMA_STORE, ptx.EARLY)},
        ),
        Step(
            name="v03_fitted_tiles",
            predictions=(
                Prediction("time", "<=", 0.95, relative=True, case=_FITTED),
                Prediction("tensor_pipe", ">=", 70, case=_FITTED),
            ),
            no_triton="Triton's tiles have sizes that are powers of two.",
            arch="==9.0a",
            wide=True,
            profile_case={"cuda": _FITTED},
            promises={90: (ptx.WGMMA, ptx.TMA_LOAD, ptx.TMA_STORE, ptx.EARLY)},
        ),
    ),
)

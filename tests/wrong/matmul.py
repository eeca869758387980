"""Products, computed wrongly."""

from __future__ import annotations

from torch import Tensor

from kernel_twins.ops.activations import ACTIVATIONS
from tests.wrong.faults import OTHERS, RESULTS, SUMS, Fault, Formula, Outputs


def matmul(fault: Fault, a: Tensor, b: Tensor) -> Outputs:
    return (fault.at("a", a) @ b,)


def linear(fault: Fault, x: Tensor, weight: Tensor, bias: Tensor, *, activation: str) -> Outputs:
    z = fault.at("x", x) @ weight.t()
    return (fault.at("epilogue", ACTIVATIONS[activation](z + fault.at("bias", bias[None]))),)


FORMULAS = {
    "linear": Formula(linear, {"x": SUMS, "bias": OTHERS, "epilogue": RESULTS}),
    **dict.fromkeys(("matmul_bf16", "matmul_fp32", "matmul_tf32x3"), Formula(matmul, {"a": SUMS})),
}

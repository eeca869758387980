"""The family's public functions, declared: a linear layer's gradients are products, by matmul's steps."""

from kernel_twins.functional.function import Function

FUNCTIONS = (
    Function(
        name="matmul",
        ops=("matmul_bf16", "matmul_fp32"),
        drawn=("matmul_bf16", "matmul_bf16", "matmul_fp32"),
        expects="matmul",
    ),
    Function(name="linear", ops=("linear", "matmul_bf16", "matmul_fp32"), drawn=("linear",), expects="linear"),
)

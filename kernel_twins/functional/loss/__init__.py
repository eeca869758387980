"""The family's public functions, declared. cross_entropy_gradient_ returns a gradient and is not differentiable."""

from kernel_twins.functional.function import Function

_OPS = ("cross_entropy", "cross_entropy_backward")

FUNCTIONS = (
    Function(name="cross_entropy", ops=_OPS, drawn=("cross_entropy",), expects="cross_entropy"),
    Function(name="cross_entropy_gradient_", ops=_OPS, drawn=("cross_entropy",), passes=("forward",)),
)

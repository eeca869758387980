"""The family's public functions, declared. Their gradients are not timed so far."""

from kernel_twins.functional.function import Function

FUNCTIONS = tuple(
    Function(name=name, ops=("attention",), drawn=("attention",), passes=("forward",), chooses=name == "attention")
    for name in ("attention", "scaled_dot_product_attention")
)

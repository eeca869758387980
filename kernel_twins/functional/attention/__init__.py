"""The family's public functions, declared. Their gradients are not timed so far."""

from kernel_twins.functional.function import Function

FUNCTIONS = tuple(
    Function(name=name, ops=("attention",), drawn=("attention",), passes=("forward",), expects=expects)
    for name, expects in (("attention", "attention"), ("scaled_dot_product_attention", ""))
)

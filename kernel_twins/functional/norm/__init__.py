"""The family's public functions, declared."""

from kernel_twins.functional.function import Function

FUNCTIONS = tuple(
    Function(name=name, ops=(name, f"{name}_backward"), drawn=(name,), expects=name)
    for name in ("layer_norm", "rms_norm")
)

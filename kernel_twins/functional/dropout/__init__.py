"""The family's public function, declared."""

from kernel_twins.functional.function import Function

FUNCTIONS = (
    Function(
        name="dropout_add", ops=("dropout_add", "dropout_add_backward"), drawn=("dropout_add",), expects="dropout_add"
    ),
)

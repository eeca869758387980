"""The family's public functions, declared."""

from kernel_twins.functional.function import Function

_OPS = ("softmax", "softmax_backward")

FUNCTIONS = (
    Function(name="softmax", ops=_OPS, drawn=("softmax",), fixed={"options": {}}, expects="softmax"),
    Function(name="log_softmax", ops=_OPS, drawn=("softmax",), fixed={"options": {"log": "yes"}}, expects="softmax"),
)

"""The family's public functions, declared."""

from kernel_twins.functional.function import Function

_OPS = ("softmax", "softmax_backward")

FUNCTIONS = (
    Function(name="softmax", ops=_OPS, drawn=("softmax",), fixed={"options": {}}, chooses=True),
    Function(name="log_softmax", ops=_OPS, drawn=("softmax",), fixed={"options": {"log": "yes"}}),
)
"""log_softmax takes the same backend as softmax."""

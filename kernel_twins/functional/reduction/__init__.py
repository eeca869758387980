"""The family's public functions, declared. A sum's gradient is a view, without a kernel; argmax has no gradient."""

from kernel_twins.functional.function import Function, Pass

_FORWARD: tuple[Pass, ...] = ("forward",)

FUNCTIONS = tuple(
    Function(
        name=name, ops=("reduction_nd",), drawn=("reduction_nd",), fixed={"kind": kind}, passes=passes, expects=expects
    )
    for name, kind, passes, expects in (
        ("sum", "sum", _FORWARD, "sum"),
        ("mean", "mean", (*_FORWARD, "backward"), "sum"),
        ("amax", "max", (*_FORWARD, "backward"), "amax"),
        ("argmax", "argmax", _FORWARD, "argmax"),
    )
)

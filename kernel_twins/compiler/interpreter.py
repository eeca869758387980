"""Triton's interpreter, which runs a kernel on the CPU: the steps that it takes, and a case of seconds for each."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

from kernel_twins.errors import UnavailableError
from kernel_twins.spec import Case, Op, Step

_MOST_BYTES, _MOST_TERMS = 2**20, 2**21  # that a small case moves, and that its sizes multiply to
_LONGEST = 2**12  # of its sizes: NumPy adds longer rows in another order than a GPU does, with other errors
SWITCH = "TRITON_INTERPRET=1"


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU too; without Triton it does not."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def unavailable() -> str:
    """Why the interpreter cannot be trusted with the libraries that are here; empty where it can."""
    import numpy
    import triton

    old = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)
    if old and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        found = f"Triton {triton.__version__} interprets no loops with numpy {numpy.__version__}"
        return f"{found}, only before 2.4: pip install 'numpy<2.4'"
    return ""


def round_to_nearest() -> None:
    """Have this process's interpreter round fp32 to bf16 as GPUs do: it cuts off."""
    import torch
    import triton.language as tl

    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        return torch.tensor(data).bfloat16().view(torch.int16).numpy()

    setattr(interpreter, "_convert_float", rounded)  # noqa: B010


def refusal(op: Op, step: Step, dtype: str | None = None) -> str:
    """Why the interpreter does not run a step, on operands of a dtype where one is given; empty where it does.

    It multiplies the bits of bf16 operands of ``tl.dot`` as if they were integers, without a word.
    """
    if reason := unavailable():
        return reason
    source = inspect.getsource(importlib.import_module(op.module(step.name)))
    if "@gluon.jit" in source:
        return f"{op.name} {step.name} is written in Gluon, which has no interpreter: take a step in Triton, or a GPU"
    if dtype == "bf16" and "tl.dot(" in source:
        others = [each for each in dict.fromkeys(case.dtype for case in op.test_cases) if each != "bf16"]
        return (
            f"{op.name} {step.name} multiplies tiles by tl.dot, which Triton's interpreter computes wrongly in bf16: "
            f"take {' or '.join(others)}, or a GPU without {SWITCH}"
        )
    return ""


def guarded(op: Op, step: Step, call: Callable[..., Any]) -> Callable[..., Any]:
    """A step's call that refuses what the interpreter would compute wrongly; UnavailableError where it does not run."""
    if reason := refusal(op, step):
        raise UnavailableError(reason)

    def checked(*inputs: Any, out: Any, **options: Any) -> None:
        import torch

        is_bf16 = bool(inputs) and getattr(inputs[0], "dtype", None) == torch.bfloat16
        if is_bf16 and (reason := refusal(op, step, "bf16")):
            raise UnavailableError(reason)
        call(*inputs, out=out, **options)

    return checked


def small_case(op: Op, step: Step) -> Case:
    """The largest plain test case that the interpreter finishes in seconds, in the profiled dtype if it takes that."""
    small = [
        case
        for case in op.test_cases
        if 0 < math.prod(case.shape) <= _MOST_TERMS and max(case.shape) <= _LONGEST and op.bytes(case) <= _MOST_BYTES
    ]
    served = [case for case in small if op.serves(step, case)]
    right = [case for case in served if not refusal(op, step, case.dtype)] or served
    dtype = op.profile_case.dtype
    return max(right, key=lambda c: (c.dtype == dtype, not c.get("values"), math.prod(c.shape), -len(c.variant)))

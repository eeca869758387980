"""What is passed as ``out`` and is no tensor, or lies wrongly: the argument is named before anything is launched."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS  # noqa: E402
from kernel_twins.ops.tensors import empty_outputs  # noqa: E402
from kernel_twins.spec import Case, Op  # noqa: E402


def case_of(op: Op) -> Case:
    """A small one with as many results as the operation may have."""
    cases = [case for case in op.test_cases if len(case.shape) < 3 and all(1 < size < 100 for size in case.shape)]
    return max(cases or op.test_cases[-1:], key=lambda case: len(op.outputs(case)))


@pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in OPS.items() if name != "attention_backward"])
def test_none_among_the_results_is_a_type_error_that_names_it(op: Op) -> None:
    """``out=None``, and for the norms ``out=(y, None, rstd)``, raised AttributeError.

    attention_backward's last step takes None for a gradient that is not wanted.
    """
    case = case_of(op)
    inputs = op.inputs(case, torch.Generator().manual_seed(0))
    out = empty_outputs(op, case, "cpu")
    wrong: dict[str, Any] = {"out": None}
    if isinstance(out, tuple):
        wrong = {f"out[{i}]": (*out[:i], None, *out[i + 1 :]) for i in range(len(out))}
    for name, given in wrong.items():
        with pytest.raises(TypeError, match=rf"^{re.escape(name)} is a NoneType, must be a torch\.Tensor"):
            op.check(*inputs, out=given, **op.options(case))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_nobody_is_told_to_copy_a_result_that_lies_wrongly(op: Op) -> None:
    """For the norms and dropout_add the remedy was out.contiguous(), whose copy is written to in out's place."""
    case = case_of(op)
    inputs = op.inputs(case, torch.Generator().manual_seed(0))
    out = empty_outputs(op, case, "cpu")
    first, *others = out if isinstance(out, tuple) else (out,)
    if first.dim() < 2:
        pytest.skip("a vector lies in one way")
    turned = first.mT.contiguous().mT
    with pytest.raises(ValueError, match=r"^out.* has strides .*: allocate it so with torch\.empty$"):
        op.check(*inputs, out=(turned, *others) if isinstance(out, tuple) else turned, **op.options(case))

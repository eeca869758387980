"""The specs: each operation lies where its spec says."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from kernel_twins import ops


@pytest.mark.parametrize(
    ("field", "told", "right"), [("family", "norm", "softmax"), ("name", "softmin", "softmax_backward")]
)
def test_an_operation_that_is_not_where_it_says_is_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, told: str, right: str
) -> None:
    module = importlib.import_module("kernel_twins.ops.softmax.softmax_backward")
    monkeypatch.setattr(module, "OP", dataclasses.replace(module.OP, **{field: told}))
    with pytest.raises(ValueError, match=rf"softmax_backward\.py: OP\.{field} is '{told}', must be '{right}' like its"):
        ops._op_of(module)

"""What torch.compile leaves in the environment does not reach the kernels that are measured after it."""

from __future__ import annotations

import os

import pytest

from kernel_twins import environment


def test_what_was_set_within_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.delenv("UNRELATED", raising=False)
    with environment.kept():
        os.environ |= {"TRITON_CACHE_DIR": "within", "TRITON_PTXAS_PATH": "within", "UNRELATED": "within"}
    assert os.environ["TRITON_CACHE_DIR"] == "before"
    assert "TRITON_PTXAS_PATH" not in os.environ
    assert os.environ.pop("UNRELATED") == "within"

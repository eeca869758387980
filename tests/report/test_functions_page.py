"""docs/functions.md says what the code says."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("torch")

import kernel_twins
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.pages import functions_page
from kernel_twins.report.rows import store

FOLDER = store.DATA / store.REFERENCE_GPU


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_reads_as_the_function_has_it(name: str) -> None:
    parameters = inspect.signature(getattr(kernel_twins, name)).parameters.values()
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters if each.name != "backend"]
    told = str(inspect.Signature(plain))[1:-1].replace("'", '"')
    assert f"| `{name}` | `{told}` |" in functions_page.parts(FOLDER)["signatures"]


def test_the_host_s_times_are_those_of_small_calls() -> None:
    header, _, *rows = functions_page.parts(FOLDER)["host"]
    assert header == "| host's time, µs | PyTorch | CUDA | Triton | auto |"
    assert any(row.startswith("| softmax 64x256-bf16 | ") for row in rows)
    assert all(row.count("|") == header.count("|") for row in rows)


def test_without_rows_that_is_said(tmp_path: Path) -> None:
    assert functions_page.parts(tmp_path)["host"] == ["Not measured yet."]

"""What torch.compile and libraries leave in the process does not reach the kernels that are measured after it."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

from kernel_twins.ops.baselines import environment_kept, imported


def test_what_was_set_within_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.delenv("UNRELATED", raising=False)
    with environment_kept():
        os.environ |= {"TRITON_CACHE_DIR": "within", "TRITON_PTXAS_PATH": "within", "UNRELATED": "within"}
    assert os.environ["TRITON_CACHE_DIR"] == "before"
    assert "TRITON_PTXAS_PATH" not in os.environ
    assert os.environ.pop("UNRELATED") == "within"


def test_torch_compile_uses_its_own_assembler_every_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from torch._inductor.runtime import compile_tasks

    ptxas = tmp_path / "torch" / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.touch(mode=0o755)
    monkeypatch.setattr(compile_tasks, "__file__", str(tmp_path / "torch" / "_inductor" / "runtime" / "x.py"))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    compile_tasks._set_triton_ptxas_path.cache_clear()
    for _ in range(2):
        with environment_kept():
            compile_tasks._set_triton_ptxas_path()  # what it does before it compiles
            assert os.environ["TRITON_PTXAS_PATH"] == str(ptxas)
        assert "TRITON_PTXAS_PATH" not in os.environ


def test_import_of_a_library_changes_no_hook_and_no_filter_of_warnings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "import sys, warnings\nsys.excepthook = print\nwarnings.simplefilter('ignore')\nloaded = True\n"
    (tmp_path / "library_that_sets_hooks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.excepthook, [*warnings.filters]
    assert imported("library_that_sets_hooks").loaded
    assert (sys.excepthook, [*warnings.filters]) == before

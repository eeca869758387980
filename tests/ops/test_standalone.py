"""Triton steps whose file may be copied as a whole: what docs/results.md tells a user to do with it is done here."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path

import pytest

from kernel_twins import OPS, ops
from kernel_twins.spec import Case
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 100
STANDALONE = [pytest.param(op.name, step.name) for op in OPS.values() for step in op.steps if step.standalone]


def source(op: str, step: str) -> str:
    return (ROOT / OPS[op].file(step, "triton")).read_text()


def copied(op: str, step: str) -> str:
    """Without the project's tuning, the autotuned kernel is launched itself."""
    text = source(op, step).replace("from kernel_twins._triton.lib import tuning\n", "")
    text = text.replace(", do_bench=tuning.bench", "").replace(", **config", "")
    text = re.sub(r" {4}kernel, config = tuning\.choose\(.*?\n {4}\)(  # fmt: skip)?\n", "", text, flags=re.DOTALL)
    return text.replace("    kernel[", f"    {op}_{step}_kernel[")


def judge(op_name: str, step: str) -> None:
    """One configuration is left of the copy's list, since nothing can be timed without a GPU."""
    from kernel_twins.harness.check import Problem, generator

    op = ops.get(op_name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "copy.py"
        file.write_text(copied(op_name, step))
        spec = importlib.util.spec_from_file_location("copy_of_step", file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        del getattr(module, f"{op_name}_{step}_kernel").configs[1:]
        for shape in ((5, 37), (3, 1_027)):
            case = Case.of(*shape, dtype="bf16")
            problem = Problem(op, case, op.inputs(case, generator(case, "cpu")))
            verdict = problem.run(getattr(module, f"{op_name}_{step}"))
            assert verdict.ok, f"{case.slug}: {verdict.reason}"


@pytest.mark.parametrize(("op", "step"), STANDALONE)
def test_a_standalone_step_is_short_autotuned_and_needs_nothing_of_the_project(op: str, step: str) -> None:
    text = copied(op, step)
    assert len(source(op, step).splitlines()) <= MOST_LINES
    assert "@triton.autotune(" in text
    assert "kernel_twins" not in text
    assert "= tuning." not in text
    forks.interpreted("tests.ops.test_standalone", "judge", op, step)

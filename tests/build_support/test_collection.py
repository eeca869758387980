"""Tests of a GPU are collected where there is one, and can be counted where there is none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_twins import OPS
from kernel_twins.harness.load import why_no_gpu

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*_gpu.py"))


def collected(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--collect-only", "-qq", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_every_step_has_its_cases_on_a_gpu() -> None:
    pytest.importorskip("triton")  # without which a file of them is not collected
    said = collected("--collect-gpu", *FILES)
    counts = {name: int(count) for name, count in re.findall(r"^(tests/[\w/]+\.py): (\d+)$", said, re.MULTILINE)}
    assert sorted(counts) == FILES
    cells = [(op, step) for op in OPS.values() for step in op.steps for _ in step.backends]
    assert counts["tests/ops/test_steps_gpu.py"] > sum(
        op.serves(step, case) for op, step in cells for case in op.test_cases
    )


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_is_said_why_there_are_none() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--collect-only", "tests/harness/test_bench_gpu.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"GPU tests are not collected: {why_no_gpu()} (--collect-gpu lists them)" in run.stdout
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED

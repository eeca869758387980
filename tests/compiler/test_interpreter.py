"""A step on the CPU, as somebody without a GPU runs it: in Triton's interpreter, and checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_twins
from kernel_twins import OPS
from kernel_twins.compiler.interpreter import unavailable
from kernel_twins.errors import UnavailableError
from kernel_twins.spec import Case
from tests import forks

pytest.importorskip("torch")
pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
needs_interpreter = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def run(*arguments: str, interpret: str = "1") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernel_twins", "run", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@needs_interpreter
@pytest.mark.parametrize(("op", "step"), [("softmax", "v02_online"), ("matmul_bf16", "v02_tensor_cores")])
def test_a_small_case_runs_on_the_cpu_and_is_checked(op: str, step: str) -> None:
    done = run(op, step, "triton")
    assert done.returncode == 0, done.stderr
    slug, told = done.stdout.split(": ")
    assert told.startswith("right, error ") and OPS[op].serves(OPS[op].step(step), Case.parse(slug))


@needs_interpreter
def test_bf16_tiles_are_refused_by_name_with_the_remedy() -> None:
    done = run("matmul_bf16", "v02_tensor_cores", "triton", "--case", "64x64x64-bf16")
    assert done.returncode == 3 and not done.stdout
    assert done.stderr == (
        "kernel_twins: matmul_bf16 v02_tensor_cores multiplies tiles by tl.dot, which Triton's interpreter computes "
        "wrongly in bf16: take fp16, or a GPU without TRITON_INTERPRET=1\n"
    )


@needs_interpreter
def test_a_loaded_step_refuses_bf16_tiles_too() -> None:
    told = forks.interpreted("tests.compiler.test_interpreter", "products")
    assert told[0].startswith("matmul_bf16 v02_tensor_cores multiplies tiles by tl.dot") and told[1] == "right"


def products() -> list[str]:
    import torch

    call, told = kernel_twins.load("matmul_bf16", "v02_tensor_cores", "triton"), []
    for dtype in (torch.bfloat16, torch.float16):
        a = torch.ones(16, 16, dtype=dtype)
        out = torch.empty_like(a)
        try:
            call(a, a, out=out)
            told.append("right" if torch.equal(out, a @ a) else "wrong")
        except UnavailableError as error:
            told.append(str(error))
    return told


@needs_interpreter
def test_gluon_is_refused_by_name() -> None:
    done = run("matmul_bf16", "v16_gluon", "triton")
    assert done.returncode == 3 and "is written in Gluon, which has no interpreter" in done.stderr


def test_without_a_gpu_the_way_to_the_cpu_is_told() -> None:
    done = run("softmax", "v02_online", "triton", interpret="0")
    assert done.returncode == 3
    assert done.stderr.endswith("with TRITON_INTERPRET=1 a small case runs on the CPU\n")
    assert "TRITON_INTERPRET" not in run("softmax", "v02_online", "cuda", interpret="0").stderr


def test_the_package_lists_its_functions() -> None:
    assert {"softmax", "rms_norm", "argmax", "nn", "load", "OPS"} <= set(dir(kernel_twins))

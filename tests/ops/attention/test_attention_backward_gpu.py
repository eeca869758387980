"""attention_backward on a GPU: what stays the same from run to run, and from process to process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernel_twins import OPS, load
from kernel_twins.harness.check import generator
from kernel_twins.ops.tensors import empty_outputs
from kernel_twins.spec import BACKENDS, Backend, Case, Step

pytestmark = pytest.mark.gpu

OP = OPS["attention_backward"]
STEPS = [(backend, step) for backend in BACKENDS for step in OP.steps_of(backend)]
CASE = Case.of(2, 6, 700, 128, dtype="bf16", kv="2", mask="causal")
REPEATS = 100
ROOT = Path(__file__).parents[3]

# FlexAttention's gradient as the first thing that a process compiles.
FLEX = """
from kernel_twins import OPS
from kernel_twins.harness.check import generator
from kernel_twins.spec import Case

op, case = OPS["attention_backward"], Case.of(1, 2, 128, 64, dtype="bf16")
op.baselines["compile"](*op.inputs(case, generator(case, "cuda")), **op.options(case), out=None)
"""


@pytest.mark.parametrize(("backend", "step"), STEPS, ids=lambda each: getattr(each, "name", each))
def test_gradients_of_keys_and_values_have_the_same_bits_every_time(backend: Backend, step: Step) -> None:
    """The sums of dq may be added in any order, those of a group's heads are not."""
    if not step.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step.name} needs compute capability {step.arch}")
    call = load(OP.name, step.name, backend)
    inputs = OP.inputs(CASE, generator(CASE, "cuda"))
    first, out = empty_outputs(OP, CASE, "cuda"), empty_outputs(OP, CASE, "cuda")
    call(*inputs, **OP.options(CASE), out=first)
    for _ in range(REPEATS):
        for each in out:
            each.fill_(torch.nan)
        call(*inputs, **OP.options(CASE), out=out)
        assert torch.equal(out[1], first[1])
        assert torch.equal(out[2], first[2])


def test_flexattention_needs_nothing_that_was_compiled_before() -> None:
    subprocess.run([sys.executable, "-c", FLEX], cwd=ROOT, check=True)

"""What compute-sanitizer says of calls whose operands end in the middle of 16 bytes, and of attention's barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import torch
import kernel_twins as kt

def values(*shape):
    return torch.ones(shape, device="cuda", dtype=torch.bfloat16)

"""
END = """
torch.cuda.synchronize()
print("called")
"""
SOFTMAX = """
for n in (7, 64, 250, 515, 2051, 8123, 40_001, 170_001, 300_001, 1_800_001):
    for x in (values(3, n), values(3, n + 3)[:, :n]):
        x.requires_grad_()
        kt.softmax(x, backend="cuda").backward(values(3, n))
        kt.log_softmax(x, backend="cuda").backward(values(3, n + 5)[:, :n])
"""
NORMS = """
for n in (61, 333, 1001, 2051, 5003, 40_001, 170_001, 300_001):
    x, pitched, weight = values(3, n), values(3, n + 3)[:, :n], values(n)
    kt.layer_norm(x, n, weight, weight, backend="cuda")
    kt.layer_norm(x, n, weight, weight, residual=x, backend="cuda")
    kt.layer_norm(pitched, n, weight, weight, residual=x, backend="cuda")
    kt.rms_norm(x, n, weight, backend="cuda")
    kt.rms_norm(x, n, weight, residual=x, backend="cuda")
    kt.rms_norm(pitched, n, weight, backend="cuda")
for n in (8, 64, 264, 1000, 2048):  # rows of whole packs, of which those of x start anywhere
    for rows in (1, 9):
        for begin in (0, 1):
            x, weight = values(begin + (rows - 1) * (n + 3) + n)[begin:].as_strided((rows, n), (n + 3, 1)), values(n)
            kt.layer_norm(x, n, weight, weight, backend="cuda")
            kt.layer_norm(x, n, weight, weight, residual=x, backend="cuda")
            kt.rms_norm(x, n, weight, backend="cuda")
            kt.rms_norm(x, n, weight, residual=x, backend="cuda")
"""
NORMS_BACKWARD = """
for n in (61, 333, 1001, 2051, 5003, 40_001, 170_001):
    for x, dout in ((values(5, n), values(5, n)), (values(5, n + 3)[:, :n], values(5, n + 5)[:, :n])):
        x, weight, bias = x.requires_grad_(), values(n).requires_grad_(), values(n).requires_grad_()
        kt.layer_norm(x, n, weight, bias, backend="cuda").backward(dout)
        kt.layer_norm(x, n, backend="cuda").backward(dout)
        kt.rms_norm(x, n, weight, backend="cuda").backward(dout)
        out, added = kt.rms_norm(x, n, weight, residual=dout, backend="cuda")
        torch.autograd.backward((out, added), (dout, dout))
"""
LOSS = """
for n in (7, 61, 1001, 2051, 40_001, 300_001):
    for logits in (values(5, n), values(5, n + 3)[:, :n]):
        logits.requires_grad_()
        target = torch.arange(5, device="cuda")
        kt.cross_entropy(logits, target, backend="cuda").backward()
        kt.cross_entropy(logits, target, label_smoothing=0.1, reduction="none", backend="cuda").sum().backward()
"""
DROPOUT = """
for rows, n in ((5, 3), (19, 61), (19, 333), (5, 5003), (3, 280_003), (17, 70_001), (9, 850_003)):
    for x, dout in ((values(rows, n), values(rows, n)), (values(rows, n + 8)[:, :n], values(rows, n + 16)[:, :n]),
                    (values(rows, n + 3)[:, :n], values(rows, n + 5)[:, :n])):
        x, bias = x.requires_grad_(), values(n).requires_grad_()
        kt.dropout_add(x, p=0.1, backend="cuda").backward(dout)
        kt.dropout_add(x, dout, bias=bias, p=0.1, backend="cuda").backward(dout)
        kt.dropout_add(x, bias=bias, p=0.1, activation="gelu", backend="cuda").backward(dout)
        kt.dropout_add(x.detach(), bias=bias, p=0.1, activation="gelu", backend="cuda").backward(dout)
"""
SUMS = """
for n in (1, 13, 61, 1001, 5003, 50_001):
    for x in (values(5, n), values(5, n + 3)[:, :n], values(5, n + 8)[:, :n], values(1, n).expand(5, n)):
        for dim in (None, 0, 1):
            kt.sum(x, dim, backend="cuda")
            kt.argmax(x, dim, backend="cuda")
        x = x.detach().requires_grad_()
        kt.mean(x, 1, backend="cuda").sum().backward()
        kt.amax(x, 0, backend="cuda").sum().backward()
for x in (values(4_000_001), values(7, 41, 25), values(3, 1_500_003)):
    kt.sum(x, backend="cuda")
    kt.sum(x, -1, backend="cuda")
    kt.argmax(x, 0, backend="cuda")
    kt.sum(x, (0, x.dim() - 1) if x.dim() > 1 else 0, backend="cuda")
for x, dim in ((values(3, 500_003), 0), (values(450, 5, 1001), 1), (values(1_500_003, 3), 0), (values(9, 70, 67), 1)):
    for x in (x, values(*x.shape[:-1], x.shape[-1] + 3)[..., : x.shape[-1]]):
        for call in (kt.sum, kt.amax, kt.argmax):
            call(x, dim, backend="cuda")
        kt.amax(x.detach().requires_grad_(), dim, backend="cuda").sum().backward()
"""
PRODUCT = """
kt.matmul(values(65, 67), values(67, 33), backend="cuda")
"""
# Keys past the last query, rows without keys, wide heads, sequences that end within a tile, and more tiles than SMs.
ATTENTION = """
from kernel_twins import OPS, load
from kernel_twins.harness.check import generator
from kernel_twins.ops.tensors import empty_outputs
from kernel_twins.spec import Case

op = OPS["{op}"]
call = load(op.name, op.steps_of("cuda")[-1].name, "cuda")
for slug in {slugs}:
    case = Case.parse(slug)
    call(*op.inputs(case, generator(case, "cuda")), **op.options(case), out=empty_outputs(op, case, "cuda"))
"""
ATTENTION_CASES = {
    "attention": (
        "1x2x193x128-bf16-mask.causal",
        "1x2x259x64-bf16-keys.130-mask.causal",
        "1x2x200x256-bf16-keys.333-mask.causal",
        "6x1x350x64-bf16-cap.3-packed.yes-scale.neg-window.30_5",
        "9x4x400x128-bf16-kv.2-mask.causal-packed.yes",
        "1x140x200x64-bf16-keys.700",
    ),
    "attention_backward": (
        "1x2x193x128-bf16-mask.causal",
        "1x2x259x64-bf16-keys.130-mask.causal",
        "2x6x150x128-bf16-kv.2-mask.causal",
        "1x2x257x128-bf16-keys.300-window.3_70",
        "1x2x200x40-bf16-keys.131",
        "1x140x200x64-bf16-keys.700",
        "1x2x200x256-bf16-keys.333-mask.causal",
        "6x1x350x64-bf16-cap.3-packed.yes-scale.neg-window.30_5",
        "9x4x400x128-bf16-kv.2-mask.causal-packed.yes",
        "2x4x330x128-bf16-deterministic.yes-keys.200-mask.causal",
        "7x2x300x256-bf16-cap.3-deterministic.yes-packed.yes",
    ),
}


def assert_clean(calls: str, check: str = "memcheck", kernels: str = "") -> None:
    """As one of the sanitizer's tools sees the calls with torch's cache off: all kernels, or those so named."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    named = ["--kernel-regex", f"kns={kernels}"] if kernels else []
    done = subprocess.run(
        [tool, "--tool", check, *named, "--error-exitcode", "9", sys.executable, "-c", BEGIN + calls + END],
        cwd=ROOT,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "called\n" not in done.stdout and "Invalid __global__ read" not in done.stdout:
        pytest.fail(f"the calls did not end:\n{done.stdout}\n{done.stderr}")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "calls",
    [SOFTMAX, NORMS, NORMS_BACKWARD, LOSS, DROPOUT, SUMS],
    ids=["softmax", "norms", "norms_backward", "loss", "dropout", "sums"],
)
def test_memcheck_of_rows(calls: str) -> None:
    assert_clean(calls)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="an operand whose rows are copied for 16-byte accesses is read 16 bytes at a time beyond its last element, "
    "which torch's allocator hides by rounding sizes up: its end is to be read within bounds (lib/repack.cuh)",
)
def test_memcheck_of_a_product() -> None:
    assert_clean(PRODUCT)


@pytest.mark.parametrize("check", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("op", ATTENTION_CASES)
def test_attention_is_clean(op: str, check: str) -> None:
    step = OPS[op].steps_of("cuda")[-1]
    if not step.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step.name} needs compute capability {step.arch}")
    assert_clean(ATTENTION.format(op=op, slugs=ATTENTION_CASES[op]), check, step.name)

"""What torch.compile makes of a few operations at their profiled cases: Inductor's Triton source. Needs a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kernel_twins import OPS
from kernel_twins.harness.load import why_no_gpu
from kernel_twins.report.rows.base import CannotRunError
from kernel_twins.report.sweeps import SWEEPS
from kernel_twins.spec import Op

FOLDER = SWEEPS / "inductor"
OPERATIONS = {"softmax": "v02_online", "layer_norm": "v02_welford", "linear": "v01_fused"}
"""Each with the Triton step that stands beside it."""

_KINDS = {
    "poi": "element by element", "red": "rows in pieces", "per": "whole rows", "tem": "a template",
}  # fmt: skip

# Kernels are named for what they fuse: triton_per_fused_add_mul_0. `poi` is pointwise, `red` and `per` reduce.
_KERNEL = re.compile(r"\bdef (triton_(?:poi|red|per|tem)_fused_\w+)\(")
_KIND = re.compile(r"triton_(poi|red|per|tem)_fused_")
_NOTED = re.compile(r"Original ATen: \[([^\]]*)\]\n(?:#.*\n)*(triton_\w+) = async_compile")
_JITTED = re.compile(r"^@triton\.jit\ndef .*?(?=\n'''|\Z)", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"\b(extern_kernels\.\w+|aten\.\w+(?:\.\w+)?)\(")
# What differs between machines and runs: paths, hashes, the description of the GPU, the benchmark behind the code.
_DROPPED = re.compile(r"^\s*(?:# AOT ID.*|# Source node.*|'?backend_hash'?.*|# kernel path:.*|triton_meta=.*)$")
_HASHES = re.compile(r"'(?:backend_hash|kernel_name_hash)': '[^']*',? ?")
_DEVICE = re.compile(r"'device': DeviceProperties\(.*?\), ")
_PATH = re.compile(r"/[\w./-]+/([\w.-]+)")
_BENCHMARK = re.compile(r"^def (?:benchmark_compiled_module|get_args)\b", re.MULTILINE)


def file(op: str) -> Path:
    return FOLDER / f"{op}.py.txt"


def record(progress: Callable[[str], None]) -> int:
    """Write a file an operation; returns how many. CannotRunError where there is no GPU."""
    if reason := why_no_gpu():
        raise CannotRunError(f"torch.compile makes Triton code for a GPU alone: {reason}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in OPERATIONS:
        progress(f"inductor {name}")
        file(name).write_text(_of(OPS[name]))
    return len(OPERATIONS)


def _of(op: Op) -> str:
    import torch
    import triton
    from torch._inductor.utils import run_and_get_code

    from kernel_twins.harness.check import generator

    case = op.profile_case
    inputs = op.inputs(case, generator(case, "cuda"))
    outs = tuple(torch.empty(each.shape, dtype=inputs[0].dtype, device="cuda") for each in op.outputs(case))
    out = outs[0] if len(outs) == 1 else outs
    compile_ = op.baselines["compile"]
    assert compile_ is not None
    # A cached compilation would leave no code to be caught.
    with torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(lambda: compile_(*inputs, **op.options(case), out=out))
    code = "\n".join(map(normalised, sources))
    head = {
        "op": op.name,
        "case": case.slug,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": ", ".join(kernels(code)),
    }
    return "".join(f"# {key}: {value}\n" for key, value in head.items()) + code


def read(path: Path) -> tuple[dict[str, str], str]:
    """A file's head and its code."""
    head: dict[str, str] = {}
    text = path.read_text()
    while match := re.match(r"# (\w+): (.*)\n", text):
        head[match[1]] = match[2]
        text = text[match.end() :]
    return head, text


def kernels(code: str) -> list[str]:
    """The fused kernels' names, and the library's kernels that are called beside them, each once."""
    return list(dict.fromkeys([*_KERNEL.findall(code), *_CALL.findall(code)]))


def fused(code: str) -> list[tuple[str, str]]:
    """Each kernel with its kind and the operations in it, as Inductor notes them above a kernel of its own."""
    noted = {name: operations for operations, name in _NOTED.findall(code)}
    return [(name, _told(name, noted.get(name, ""))) for name in kernels(code)]


def _told(kernel: str, operations: str) -> str:
    match = _KIND.match(kernel)
    return f"{_KINDS[match[1]]}; fuses {operations}" if match else "a library's kernel"


def of_kernels(code: str) -> str:
    """The Triton kernels alone, without the module that starts them."""
    return "\n\n".join(match[0] for match in _JITTED.finditer(code)) + "\n"


def normalised(code: str) -> str:
    """Inductor's module without what differs from run to run, and without its benchmark."""
    text = _BENCHMARK.split(code, maxsplit=1)[0]
    kept = [line.rstrip() for line in text.splitlines() if not _DROPPED.match(line)]
    text = _PATH.sub(r"\1", _DEVICE.sub("", _HASHES.sub("", "\n".join(kept))))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

"""Which code a time of a public function belongs to: one digest for each function, of what its calls run.

That is the function's modules, the torch side of its family, the ladders behind it in both languages, all that these
include or import, which of their steps stand behind it, and the configurations that a search found for Triton steps.
Where the files lie has no say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kernel_twins import OPS
from kernel_twins.report.rows import identity, store
from kernel_twins.spec import BACKENDS


@dataclass(frozen=True, slots=True)
class _Sides:
    """A module of functional/<family>, and the operations whose ladders its functions call."""

    module: str
    ops: tuple[str, ...]


_REDUCTION = _Sides("reduction", ("reduction_nd",))
_FUNCTIONS = {
    "matmul": _Sides("matmul", ("matmul_bf16", "matmul_fp32")),
    "linear": _Sides("linear", ("linear", "matmul_bf16", "matmul_fp32")),
    "softmax": _Sides("softmax", ("softmax", "softmax_backward")),
    "layer_norm": _Sides("norm", ("layer_norm", "layer_norm_backward")),
    "rms_norm": _Sides("norm", ("rms_norm", "rms_norm_backward")),
    "cross_entropy": _Sides("cross_entropy", ("cross_entropy", "cross_entropy_backward")),
    "dropout_add": _Sides("dropout", ("dropout_add", "dropout_add_backward")),
    **dict.fromkeys(("sum", "mean", "amax", "argmax"), _REDUCTION),
}
FUNCTIONS = tuple(_FUNCTIONS)


def sources(function: str) -> set[Path]:
    """The files of code that a function's calls run."""
    sides = _FUNCTIONS[function]
    family = OPS[sides.ops[0]].family
    folder = store.ROOT / "kernel_twins" / "functional" / family
    modules = [folder / f"{side}{sides.module}.py" for side in ("", "triton_")]
    torch_side = (store.ROOT / "cuda-kernels" / family).glob("torch*.cpp")
    ladders = [
        path
        for op in sides.ops
        for backend in BACKENDS
        for path in (store.ROOT / OPS[op].folder(backend)).iterdir()
        if path.is_file()
    ]
    return identity.reached([*modules, *torch_side, *ladders])


def code(gpu: str, function: str) -> str:
    """Digest of what a function's calls run on a GPU, as it is now."""
    file = store.ROOT / "triton-kernels" / "tuned" / f"{gpu}.json"
    tuned = json.loads(file.read_text()) if file.exists() else {}
    ops = _FUNCTIONS[function].ops
    own = {step: found for step, found in tuned.items() if step.partition("/")[0] in ops}
    own |= {op: dict(OPS[op].behind) for op in ops}
    return identity.digest(f"{identity.files_digest(sources(function))} {json.dumps(own, sort_keys=True)}")


def codes(gpu: str) -> dict[str, str]:
    """The digest of every function."""
    return {function: code(gpu, function) for function in FUNCTIONS}

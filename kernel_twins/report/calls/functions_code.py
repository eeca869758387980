"""Which code a time of a public function belongs to: one digest for each function, of what its calls run.

That is the function's modules, the torch side of its family, the ladders behind it in both languages, all that these
include or import, and the configurations that a search found for their Triton steps. Where the files lie has no say.
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
    """A module of functional/<family>, a file of operators in C++, and the operations whose ladders they call."""

    module: str
    operators: str
    ops: tuple[str, ...]


_REDUCTION = _Sides("reduction", "reduction/torch.cpp", ("reduction_nd",))
_FUNCTIONS = {
    "matmul": _Sides("matmul", "matmul/torch.cpp", ("matmul_bf16", "matmul_fp32")),
    "linear": _Sides("linear", "matmul/torch.cpp", ("linear", "matmul_bf16", "matmul_fp32")),
    "softmax": _Sides("softmax", "softmax/torch.cpp", ("softmax", "softmax_backward")),
    "layer_norm": _Sides("norm", "norm/torch.cpp", ("layer_norm", "layer_norm_backward")),
    "rms_norm": _Sides("norm", "norm/torch.cpp", ("rms_norm", "rms_norm_backward")),
    "cross_entropy": _Sides("cross_entropy", "loss/torch.cpp", ("cross_entropy", "cross_entropy_backward")),
    "dropout_add": _Sides("dropout", "dropout/torch.cpp", ("dropout_add", "dropout_add_backward")),
    **dict.fromkeys(("sum", "mean", "amax", "argmax"), _REDUCTION),
}
FUNCTIONS = tuple(_FUNCTIONS)


def sources(function: str) -> set[Path]:
    """The files of code that a function's calls run."""
    sides = _FUNCTIONS[function]
    folder = store.ROOT / "kernel_twins" / "functional" / OPS[sides.ops[0]].family
    modules = [folder / f"{side}{sides.module}.py" for side in ("", "triton_")]
    ladders = [
        path
        for op in sides.ops
        for backend in BACKENDS
        for path in (store.ROOT / OPS[op].folder(backend)).iterdir()
        if path.is_file()
    ]
    return identity.reached([*modules, store.ROOT / "cuda-kernels" / sides.operators, *ladders])


def code(gpu: str, function: str) -> str:
    """Digest of what a function's calls run on a GPU, as it is now."""
    file = store.ROOT / "triton-kernels" / "tuned" / f"{gpu}.json"
    tuned = json.loads(file.read_text()) if file.exists() else {}
    own = {step: found for step, found in tuned.items() if step.partition("/")[0] in _FUNCTIONS[function].ops}
    return identity.digest(f"{identity.files_digest(sources(function))} {json.dumps(own, sort_keys=True)}")


def codes(gpu: str) -> dict[str, str]:
    """The digest of every function."""
    return {function: code(gpu, function) for function in FUNCTIONS}

"""From the name of a step to something that can be called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from kernel_twins import ops
from kernel_twins.errors import UnavailableError
from kernel_twins.spec import BACKENDS, Backend, Name, Op, Reference

if TYPE_CHECKING:
    import torch

Call = Callable[..., Any]


def why_no_gpu() -> str:
    """Why nothing can be measured on this machine; empty if it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return "" if torch.cuda.is_available() else "no NVIDIA GPU is visible"


def extension() -> ModuleType:
    """The compiled extension; UnavailableError says why it is not there."""
    try:
        import torch
    except ImportError as error:
        raise UnavailableError("the CUDA side is missing: torch is not installed") from error
    try:
        return importlib.import_module("kernel_twins._C")
    except ImportError as error:
        if torch.version.cuda is None:
            reason = f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch, then build"
        else:
            reason = f"the extension does not import ({error}): build"
        raise UnavailableError(f"the CUDA side is missing, {reason} it with `python setup.py build_ext`") from error


def load(op: str, step: str, backend: Backend) -> Call:
    """Return ``call(*inputs, **options, out=tensor)`` for one step of an operation, or with a tuple of several tensors.

    The call checks its arguments (TypeError or ValueError names the one at fault), writes into ``out`` on the
    current stream and returns nothing. Shapes and dtypes are the op's, see ``kernel_twins.ops``. ValueError when
    there is no such op, step or backend; UnavailableError when the backend cannot be used on this machine.
    """
    spec = ops.get(op)
    chosen = spec.step(step)
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")
    if backend not in chosen.backends:
        raise ValueError(f"{op} {step} exists in {', '.join(chosen.backends)} only: {chosen.gap}")
    return _load_cuda(op, step) if backend == "cuda" else _load_triton(op, step)


def load_baseline(op: str, name: str) -> Call:
    """Return what a user would call instead of our kernels, or a reference, in the same form as ``load`` does.

    A baseline may return tensors of its own instead of writing into ``out``.
    """
    spec = ops.get(op)
    if name in spec.references:
        return _load_reference(spec.references[name])
    if name not in spec.baselines:
        raise ValueError(f"baseline is {name!r}; {op} has {', '.join([*spec.baselines, *spec.references])}")
    return spec.baselines[name] or _load_cuda(op, name)


def _load_reference(reference: Reference) -> Call:
    def call(*inputs: Any, out: Any, **options: Any) -> None:
        last = ops.get(reference.op).steps_of(reference.backend)[-1]
        load(reference.op, last.name, reference.backend)(*reference.operands(*inputs), out=out)

    return call


def load_named(op: str, name: Name) -> Call:
    """Return the step, the baseline or the reference of that name."""
    return load(op, name.step, cast(Backend, name.backend)) if name.step else load_baseline(op, name.backend)


def _load_cuda(op: str, step: str) -> Call:
    adaptor = getattr(extension(), op)

    def call(*inputs: Any, out: Any, **options: Any) -> None:
        adaptor(step, *inputs, out=out, **options)

    return call


def _load_triton(op: str, step: str) -> Call:
    try:
        import triton
    except ImportError as error:
        raise UnavailableError("the Triton side is missing: pip install triton") from error
    import torch

    spec = ops.get(op)
    chosen = spec.step(step)
    launch = getattr(importlib.import_module(spec.module(step)), f"{op}_{step}")
    interpreted = triton.knobs.runtime.interpret
    # Of a step's other outputs, such as the place of a maximum, the spec's own check knows the dtype.
    narrow = not chosen.fp32_out and any(each.fp32_out for each in spec.steps_of("triton"))
    usual = _usual_out(spec) if narrow else {}

    def call(*inputs: Any, out: Any, **options: Any) -> None:
        spec.check(*inputs, out=out, **options)
        first = out[0] if isinstance(out, tuple) else out
        if narrow and first.dtype != (expected := usual[inputs[0].dtype]):
            others = ", ".join(each.name for each in spec.steps_of("triton") if each.fp32_out)
            raise TypeError(f"out is {first.dtype}, must be {expected}: {op} {step} writes no other, take {others}")
        if interpreted:
            launch(*inputs, out=out, **options)
            return
        if not first.is_cuda:
            raise ValueError(
                f"out is on {first.device}, must be on a GPU: move the tensors there, or set TRITON_INTERPRET=1"
            )
        with torch.cuda.device(first.device):
            if not chosen.runs_on(capability := torch.cuda.get_device_capability()):
                raise RuntimeError(
                    f"{op} {step} needs compute capability {chosen.arch}, this GPU has {'.'.join(map(str, capability))}"
                )
            launch(*inputs, out=out, **options)

    return call


def _usual_out(op: Op) -> dict[torch.dtype, torch.dtype]:
    """The dtype of an operation's output by that of its inputs, where a case names no other."""
    from kernel_twins.ops.tensors import DTYPE

    usual = (case for case in op.test_cases if not case.get("out"))
    return {DTYPE[case.dtype]: DTYPE[op.outputs(case)[0].dtype] for case in usual}

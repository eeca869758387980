"""Finds a step or a baseline by name, and returns it as a call."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from kernel_twins import ops, remedies
from kernel_twins.errors import UnavailableError
from kernel_twins.spec import BACKENDS, Backend, Name, Reference

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
    """The compiled extension; UnavailableError says why it is missing."""
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
        raise UnavailableError(
            f"the CUDA side is missing, {reason} it with {remedies.told(remedies.build())}"
        ) from error


def load(op: str, step: str, backend: Backend) -> Call:
    """Return ``call(*inputs, **options, out=tensor)`` for one step of an operation, or with a tuple of several tensors.

    The call checks its arguments (TypeError or ValueError names the one at fault), writes into ``out`` on the
    current stream and returns nothing. Shapes and dtypes are the op's, see ``kernel_twins.ops``. ValueError if there is
    no such op, step or backend; UnavailableError if the backend cannot be used on this machine.
    """
    spec = ops.get(op)
    chosen = spec.step(step)
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")
    if backend not in chosen.backends:
        raise ValueError(f"{op} {step} exists in {', '.join(chosen.backends)} only: {chosen.gap}")
    return _load_cuda(op, step) if backend == "cuda" else _load_triton(op, step)


def load_baseline(op: str, name: str) -> Call:
    """Return a baseline or a reference, in the same form as ``load`` returns a step.

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


def require(op: str, backend: Backend, step: str, *inputs: Any, out: Any, **options: Any) -> None:
    """TypeError or ValueError if a step does not take these arguments. No other code checks them.

    It runs before anything is launched: ``load`` calls it for Triton steps, the extension itself for CUDA steps.
    """
    from kernel_twins.ops.tensors import require_cuda, require_values

    spec = ops.get(op)
    outs = out if isinstance(out, tuple) else (out,)
    results = {f"out[{index}]" if isinstance(out, tuple) else "out": tensor for index, tensor in enumerate(outs)}
    named = dict(zip(_parameters(op), inputs, strict=False)) | options
    for name, value in (results | named).items():
        require_values(name, value)
    spec.check(*inputs, out=out, **options)
    first = named[_parameters(op)[0]]
    if (usual := _usual_out(op, backend, step)) and outs[0].dtype != (expected := usual[first.dtype]):
        others = ", ".join(each.name for each in spec.steps_of(backend) if each.fp32_out)
        raise TypeError(f"out is {outs[0].dtype}, must be {expected}: {op} {step} writes no other, take {others}")
    if backend == "cuda":
        require_cuda(_parameters(op)[0], first)  # all others are on the same device
    elif not _is_interpreted():
        require_cuda(_parameters(op)[0], first, "set TRITON_INTERPRET=1 before Triton is imported")


@functools.cache
def _parameters(op: str) -> tuple[str, ...]:
    """The names of a call's arguments, inputs first."""
    return tuple(inspect.signature(ops.get(op).check).parameters)


@functools.cache
def _usual_out(op: str, backend: Backend, step: str) -> Mapping[torch.dtype, torch.dtype]:
    """The only dtype of ``out`` that a step writes for an input dtype; empty if the spec's check suffices.

    The spec's check knows the dtypes of other outputs, such as an argmax.
    """
    from kernel_twins.ops.tensors import DTYPE

    spec = ops.get(op)
    writers = [each.name for each in spec.steps_of(backend) if each.fp32_out]
    if not writers or step in writers:
        return {}
    usual = (case for case in spec.test_cases if not case.get("out"))
    return {DTYPE[case.dtype]: DTYPE[spec.outputs(case)[0].dtype] for case in usual}


def _is_interpreted() -> bool:
    """Whether Triton interprets its kernels in Python, which works on a CPU, too."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _load_cuda(op: str, step: str) -> Call:
    return functools.partial(getattr(extension(), op), step)


def _load_triton(op: str, step: str) -> Call:
    try:
        interpreted = _is_interpreted()
    except ImportError as error:
        raise UnavailableError("the Triton side is missing: pip install triton") from error
    import torch

    spec = ops.get(op)
    chosen = spec.step(step)
    launch = getattr(importlib.import_module(spec.module(step)), f"{op}_{step}")

    def call(*inputs: Any, out: Any, **options: Any) -> None:
        require(op, "triton", step, *inputs, out=out, **options)
        if interpreted:
            launch(*inputs, out=out, **options)
            return
        first = out[0] if isinstance(out, tuple) else out
        with torch.cuda.device(first.device):
            if not chosen.runs_on(capability := torch.cuda.get_device_capability()):
                raise RuntimeError(
                    f"{op} {step} needs compute capability {chosen.arch}, this GPU has {'.'.join(map(str, capability))}"
                )
            launch(*inputs, out=out, **options)

    return call

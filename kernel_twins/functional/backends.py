"""What the public functions share: finding a backend's side of a function, and knowing when values are all there is.

The CUDA side is operators in C++ (cuda-kernels/<family>/torch*.cpp), the Triton side some in Python. Nothing imports
Triton before it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_current_level,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from kernel_twins import ops
from kernel_twins.errors import UnavailableError
from kernel_twins.functional.choice import nearest
from kernel_twins.functional.rows import Rule
from kernel_twins.harness.ceilings import gpu_slug
from kernel_twins.harness.load import extension
from kernel_twins.spec import Backend, Case, Step

Function = Callable[..., Any]
Operator = Callable[..., Tensor]

BACKENDS = ("auto", "cuda", "triton", "torch")
HALF = (torch.bfloat16, torch.float16)

_Side = TypeVar("_Side")
_Asked = TypeVar("_Asked", bound=Function)
_PLAIN = (Tensor, torch.nn.Parameter)
_BATCHED: Any = torch._C._parse_dispatch_key("Batched")


def cuda_operator(name: str) -> tuple[Operator | None, str]:
    """The operator of cuda-kernels/*/torch*.cpp, or None and why it is not there."""
    try:
        known = extension()
    except UnavailableError as error:
        return None, f"{error}, or pass backend='torch'"
    operator: Operator | None = getattr(getattr(torch.ops.kernel_twins, name, None), "default", None)
    if not hasattr(known, "runs"):  # which "auto" asks
        operator = None
    function = name.removesuffix("_result")
    stale = f"the extension is older than kernel_twins.{function}: build it again with `python setup.py build_ext`"
    return operator, "" if operator else f"{stale}, or pass backend='torch'"


def register_vmap(name: str, rule: Callable[[Function], Rule]) -> None:
    """Gives an operator in C++ the batching rule that is made of it."""
    torch.library.register_vmap(f"kernel_twins::{name}", rule(getattr(torch.ops.kernel_twins, name).default))


def triton_side(imported: Callable[[], _Side]) -> Callable[[], _Side]:
    """Makes a function's Triton side known once it is asked for; UnavailableError where Triton is not installed.

    ``imported`` imports it in a statement, which torch.compile can trace.
    """

    def found() -> _Side:
        try:
            return imported()
        except ImportError as error:
            raise UnavailableError("the Triton side is missing: pip install triton, or pass backend='torch'") from error

    known = cache(found)
    # Dynamo warns of a cache, which it would not use.
    return lambda: found() if torch.compiler.is_dynamo_compiling() else known()


def step_behind(op: str, backend: Backend, capability: tuple[int, int] | None, fp32_out: bool = False) -> Step | None:
    """The first of the steps behind a function that a GPU runs, or the first of all where there is no GPU to ask.

    With ``fp32_out``, of those that write fp32 where the usual result is narrower.
    """
    steps = map(ops.get(op).step, ops.get(op).behind[backend])
    able = (step for step in steps if step.fp32_out or not fp32_out)
    return next((step for step in able if capability is None or step.runs_on(capability)), None)


@cache
def triton_launcher(op: str, device: int | None) -> Callable[..., None]:
    """The launcher of the Triton step behind a function that the GPU runs; RuntimeError where it runs none.

    ``device`` is None where there is no GPU to ask, as for meta tensors.
    """
    step = step_behind(op, "triton", None if device is None else torch.cuda.get_device_capability(device))
    if step is None:
        raise RuntimeError(f"no Triton step of {op} runs on this GPU: pass backend='torch'")
    launch: Callable[..., None] = getattr(importlib.import_module(ops.get(op).module(step.name)), f"{op}_{step.name}")
    return launch


def runs(backend: Backend, names: tuple[str, ...], device: int, fp32_out: bool = False) -> bool:
    """Whether a GPU runs what stands behind a backend: of each operation the first step that its capability allows.

    That is the step that measurements are of. Where the extension was not built for it but for a later one, the backend
    does not count as running: nobody has measured that. ``fp32_out`` is ``step_behind``'s.

    The CUDA side's extension is its function's own to look for.
    """
    capability = _capability(device)
    return capability is not None and _runs_on(backend, names, capability, fp32_out)


@cache
def _runs_on(backend: Backend, names: tuple[str, ...], capability: tuple[int, int], fp32_out: bool) -> bool:
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return False
    for op in names:
        step = step_behind(op, backend, capability, fp32_out)
        if step is None:
            return False
        if backend == "cuda" and not extension().runs(step.arch, capability, extension().architectures):
            return False
    return True


@cache
def _capability(device: int) -> tuple[int, int] | None:
    """A GPU's, or None where there is none of this number: what stands for tensors may lie on one all the same."""
    if not torch.cuda.is_available() or device >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_capability(device)


def constant(asked: _Asked) -> _Asked:
    """Makes what a function answers a constant of a trace: torch.compiler's decorator, which has no types."""
    torch.compiler.assume_constant_result(asked)
    return asked


def runs_of(operator: Operator | None, *names: str) -> Callable[[Backend, int], bool]:
    """Of a function: whether a backend is there and has steps for a GPU of its operations, at any length of rows."""

    @constant
    def known(backend: Backend, device: int) -> bool:
        return (backend != "cuda" or operator is not None) and runs(backend, names, device)

    return known


def fastest(
    function: str,
    problem: Case,
    device: int,
    is_there: Callable[[Backend, int], bool],
    *comparable: Callable[[Case], bool],
    over_torch: bool = False,
) -> str:
    """The backend that is fastest at the nearest measured problem; "cuda", where it runs, for one that does not.

    With ``over_torch`` PyTorch would do more than what was measured, and is not taken for being the fastest.
    """
    best = nearest(gpu_slug(torch.cuda.get_device_name(device)), function, problem, *comparable)
    if (best == "torch" and not over_torch) or (best == "triton" and is_there("triton", device)):
        return best
    return "cuda" if is_there("cuda", device) else "torch"


# What a call is in, for "auto". Of a trace it is a constant: a graph keeps to what it was made in.


@constant
def is_differentiated() -> bool:
    """Whether forward-mode or torch.func's derivatives are taken, which are PyTorch's operators' alone."""
    if forward_ad._current_level >= 0:
        return True
    if maybe_current_level() is None:  # sooner told than what layers there are
        return False
    return any(layer.key() != TransformType.Vmap for layer in get_interpreter_stack() or ())


@constant
def is_transformed() -> bool:
    """Whether the same is done, or torch.func.vmap batches."""
    return forward_ad._current_level >= 0 or maybe_current_level() is not None


@constant
def batches() -> int:
    """How many of torch.func.vmap there are, each of which may add a dimension to a tensor."""
    return [layer.key() for layer in get_interpreter_stack() or ()].count(TransformType.Vmap)


def require_gpu(name: str, tensor: Tensor, backend: str) -> None:
    """TypeError where it is no tensor, ValueError where it is on no GPU."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor: call torch.as_tensor({name})")
    if not tensor.is_cuda:
        raise ValueError(
            f"{name} is on {tensor.device}, must be on a CUDA device for backend={backend!r}: "
            f"call {name}.cuda(), or pass backend='torch'"
        )


def require_tensors(residual: Tensor | None, weight: Tensor | None, bias: Tensor | None = None) -> None:
    """TypeError where one is there that is no tensor: the dispatcher says so as a RuntimeError."""
    for name, given in (("residual", residual), ("weight", weight), ("bias", bias)):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(
                f"{name} is a {type(given).__name__}, must be a torch.Tensor or None: "
                f"call torch.as_tensor({name}, dtype=x.dtype, device=x.device)"
            )


def is_on_gpu(tensor: Any) -> bool:
    """Whether it is a tensor on a GPU that has sizes and strides, or stands for one, on a GPU that is there.

    Other classes, as DTensor, know what to do about PyTorch's operators, and not about ours.
    """
    if type(tensor) not in _PLAIN and not _stands_for_one(tensor):
        return False
    return tensor.is_cuda and tensor.layout == torch.strided and not tensor.is_nested


def _stands_for_one(tensor: object) -> bool:
    return (
        isinstance(tensor, (FakeTensor, FunctionalTensor))
        and tensor.is_cuda
        and _capability(tensor.device.index) is not None
    )


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a GPU the current one, which launches need; costs next to nothing where it is, as it mostly is."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device(device)


def is_plain(*tensors: Tensor) -> bool:
    """Whether a call needs no operator: nobody traces or transforms it, and all tensors are PyTorch's own, as they lie.

    A lazily negated one holds other signs than those of its values; one that outlived a transform of torch.func's is
    still wrapped, and has no memory of its own.
    """
    if maybe_current_level() is not None or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack() > 0:  # a mode wants to see every operator
        return False
    for tensor in tensors:  # all() of a generator takes half as long again, on every call
        if type(tensor) not in _PLAIN or tensor.is_meta or tensor.is_neg() or is_functorch_wrapped_tensor(tensor):
            return False
    return True


def is_batched(gradient: Tensor) -> bool:
    """Whether it is of torch.autograd.grad's is_grads_batched, which has a vmap of its own."""
    return torch._C._dispatch_keys(gradient).has(_BATCHED)


def refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    """NotImplementedError where torch.func.grad or its like follow a tensor, which our operators refuse in PyTorch's
    words, without a remedy. Asked only where a call is not plain, or did fail: an ordinary one has no time for it.
    """
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and _is_followed(tensor) for tensor in tensors):
        raise NotImplementedError(f"{name} has no derivative for torch.func's grad and vjp: pass backend='torch'")


def _is_followed(tensor: Tensor) -> bool:
    while is_functorch_wrapped_tensor(tensor):  # by one transform around another
        if is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    return False


def refuse_tangents(name: str, *tensors: Tensor) -> None:
    """NotImplementedError where a forward-mode derivative is under way, which operators in Python lose silently, or one
    of torch.func's.
    """
    if maybe_current_level() is not None:
        refuse_gradients(f"the Triton {name}", *tensors)
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(f"the Triton {name} has no forward-mode derivative: pass backend='torch'")


def wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

"""Finds a backend's implementation of a public function, and tells when a call can bypass PyTorch's dispatcher.

The CUDA side is operators in C++ (cuda-kernels/<family>/torch*.cpp), the Triton side operators in Python. Triton is
imported only when a call needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from operator import index
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
from torch.fx.experimental.symbolic_shapes import has_static_value

from kernel_twins import ops, remedies
from kernel_twins.errors import UnavailableError
from kernel_twins.functional.expected import Problem, is_measured, ordered
from kernel_twins.functional.kept import ABSENT, heard, left
from kernel_twins.functional.rows import Rule
from kernel_twins.harness.ceilings import REFERENCE_GPU, gpu_slug
from kernel_twins.harness.load import extension
from kernel_twins.ops.tensors import DTYPE
from kernel_twins.spec import Backend, Step

Function = Callable[..., Any]
Operator = Callable[..., Tensor]

BACKENDS = ("auto", "cuda", "triton", "torch")
HALF = (torch.bfloat16, torch.float16)

_Side = TypeVar("_Side")
_Asked = TypeVar("_Asked", bound=Function)
_LIKE: dict[tuple[int, int] | None, str] = {(9, 0): REFERENCE_GPU}
_PLAIN = (Tensor, torch.nn.Parameter)
_BATCHED: Any = torch._C._parse_dispatch_key("Batched")


def cuda_operator(name: str) -> tuple[Operator | None, str]:
    """The operator of cuda-kernels/*/torch*.cpp, or None and the reason why it is missing."""
    try:
        known = extension()
    except UnavailableError as error:
        return None, f"{error}, or pass backend='torch'"
    operator: Operator | None = getattr(getattr(torch.ops.kernel_twins, name, None), "default", None)
    if not hasattr(known, "runs"):  # "auto" calls it
        operator = None
    function = name.removesuffix("_result")
    stale = f"the extension is older than kernel_twins.{function}: build it again with {remedies.told(remedies.BUILD)}"
    return operator, "" if operator else f"{stale}, or pass backend='torch'"


def register_vmap(name: str, rule: Callable[[Function], Rule]) -> None:
    """Registers the batching rule that ``rule`` makes from an operator in C++."""
    torch.library.register_vmap(f"kernel_twins::{name}", rule(getattr(torch.ops.kernel_twins, name).default))


def triton_side(imported: Callable[[], _Side]) -> Callable[[], _Side]:
    """A cached getter of a function's Triton side; it raises UnavailableError if Triton is not installed.

    ``imported`` contains the import as a statement, because torch.compile can trace that.
    """

    def found() -> _Side:
        try:
            return imported()
        except ImportError as error:
            raise UnavailableError("the Triton side is missing: pip install triton, or pass backend='torch'") from error

    known = cache(found)
    # Dynamo ignores functools.cache, with a warning.
    return lambda: found() if torch.compiler.is_dynamo_compiling() else known()


def step_behind(op: str, backend: Backend, capability: tuple[int, int] | None, fp32_out: bool = False) -> Step | None:
    """The first step behind a function that a GPU runs, or the first of all if ``capability`` is None.

    With ``fp32_out``, only steps count that can write fp32 where the usual result is narrower.
    """
    steps = map(ops.get(op).step, ops.get(op).behind[backend])
    able = (step for step in steps if step.fp32_out or not fp32_out)
    return next((step for step in able if capability is None or step.runs_on(capability)), None)


@cache
def triton_launcher(op: str, device: int | None) -> Callable[..., None]:
    """The launcher of the Triton step behind a function on this GPU; RuntimeError if the GPU runs none.

    ``device`` is None if there is no GPU, as for meta tensors.
    """
    step = step_behind(op, "triton", None if device is None else torch.cuda.get_device_capability(device))
    if step is None:
        raise RuntimeError(f"no Triton step of {op} runs on this GPU: pass backend='torch'")
    launch: Callable[..., None] = getattr(importlib.import_module(ops.get(op).module(step.name)), f"{op}_{step.name}")
    return launch


def runs(backend: Backend, names: tuple[str, ...], device: int, fp32_out: bool = False) -> bool:
    """Whether a GPU runs, for each operation, the first step behind a backend that its compute capability allows.

    That is the step that was measured. If the extension was built only for a later step of the list, the answer is no,
    because that was not measured. ``fp32_out`` is that of ``step_behind``. The caller must have found the extension.
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
    """A GPU's compute capability; None if there is no such GPU. Fake tensors can be on a GPU that does not exist."""
    if not torch.cuda.is_available() or device >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_capability(device)


def constant(asked: _Asked) -> _Asked:
    """Makes a function's result a constant of a trace; torch.compiler's decorator, with types."""
    torch.compiler.assume_constant_result(asked)
    return asked


def runs_of(operator: Operator | None, *names: str) -> Callable[[Backend, int], bool]:
    """A test for a public function: whether a backend is installed and has steps for a GPU, at any length of rows."""

    @constant
    def known(backend: Backend, device: int) -> bool:
        return (backend != "cuda" or operator is not None) and runs(backend, names, device)

    return known


def expected(
    function: str,
    problem: Problem | None,
    device: int,
    is_there: Callable[[Backend, int], bool],
    *,
    differentiated: bool,
    over_torch: bool = False,
    traced: bool = False,
) -> str:
    """The backend, of those that run here, that is expected to be the fastest; "cuda" where nothing was measured.

    With ``over_torch`` PyTorch is not chosen, because this call costs it more than the measured one. A call that is
    ``traced`` is PyTorch's where Inductor is expected to be faster; its problem is None if sizes are symbols. While a
    graph is captured Triton is not taken, which may have to compile its kernel.
    """
    if (hears := heard()) is not None:
        hears.function, hears.problem, hears.device, hears.differentiated = function, problem, device, differentiated
    captures = not traced and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    lacks = False
    for best in ordered(measured_gpu(device), function, problem, differentiated, traced, captures):
        if best == "torch":
            if not over_torch:
                return left(ABSENT) if lacks else best
        elif not (best == "triton" and captures) and is_there("cuda" if best == "cuda" else "triton", device):
            return best
        else:
            lacks = True
    return "cuda" if is_there("cuda", device) else left(ABSENT)


def measured_gpu(device: int) -> str:
    """The GPU whose times are asked for: this one, or one of its compute capability if it was never measured."""
    gpu = gpu_slug(torch.cuda.get_device_name(device))
    return gpu if is_measured(gpu) else _LIKE.get(_capability(device), gpu)


def is_static(*tensors: Tensor | None) -> bool:
    """Whether all sizes and strides are numbers in a trace, and not symbols."""
    for tensor in tensors:
        if tensor is not None and not all(has_static_value(size) for size in (*tensor.shape, *tensor.stride())):
            return False
    return True


def as_numbers(dim: Any) -> Any:
    """A dim of a traced call, or a tuple of them, without symbols, which a compiled function's arguments may be.

    PyTorch's functions make numbers of them, too.
    """
    if isinstance(dim, tuple):
        return tuple([as_numbers(each) for each in dim])
    return index(dim) if isinstance(dim, int) else dim


# Transforms around a call, for "auto". They are constants of a trace: a graph is valid only for those it was made in.


@constant
def is_differentiated() -> bool:
    """Whether forward-mode or torch.func's derivatives are active; only PyTorch's operators support them."""
    if forward_ad._current_level >= 0:
        return True
    if maybe_current_level() is None:  # faster than listing the layers
        return False
    return any(layer.key() != TransformType.Vmap for layer in get_interpreter_stack() or ())


@constant
def is_transformed() -> bool:
    """Whether such derivatives or torch.func.vmap are active."""
    return forward_ad._current_level >= 0 or maybe_current_level() is not None


@constant
def batches() -> int:
    """The number of active torch.func.vmap; each may add a dimension to a tensor."""
    return [layer.key() for layer in get_interpreter_stack() or ()].count(TransformType.Vmap)


def require_gpu(name: str, tensor: Tensor, backend: str) -> None:
    """TypeError if it is no tensor, ValueError if it is not on a GPU."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor: call torch.as_tensor({name})")
    if not tensor.is_cuda:
        raise ValueError(
            f"{name} is on {tensor.device}, must be on a CUDA device for backend={backend!r}: "
            f"call {name}.cuda(), or pass backend='torch'"
        )


def require_tensors(residual: Tensor | None, weight: Tensor | None, bias: Tensor | None = None) -> None:
    """TypeError if one is neither None nor a tensor; the dispatcher would raise a RuntimeError."""
    for name, given in (("residual", residual), ("weight", weight), ("bias", bias)):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(
                f"{name} is a {type(given).__name__}, must be a torch.Tensor or None: "
                f"call torch.as_tensor({name}, dtype=x.dtype, device=x.device)"
            )


def in_dtype(call: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """``call`` of x in that dtype, whatever autocast says, as PyTorch's functions that have a ``dtype``.

    TypeError if the kernels do not have it.
    """
    if dtype not in DTYPE.values():
        accepted = ", ".join(map(str, DTYPE.values()))
        raise TypeError(
            f"dtype is {dtype}, must be None or one of {accepted} for backend={backend!r}: pass backend='torch'"
        )
    x = x.to(dtype) if isinstance(x, Tensor) else x  # what is no tensor is refused by call
    if not torch.is_autocast_enabled("cuda"):
        return call(x)
    with torch.autocast("cuda", enabled=False):
        return call(x)


def narrowed(x: Tensor, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """float32 weights of a half-precision x in its dtype, which the kernels read; their gradients come in float32."""
    if isinstance(x, Tensor) and x.dtype in HALF:
        for each in weights:  # mostly none is wide, and a loop tells that faster than any() of a generator
            if isinstance(each, Tensor) and each.dtype == torch.float32:
                return tuple(
                    one.to(x.dtype) if isinstance(one, Tensor) and one.dtype == torch.float32 else one
                    for one in weights
                )
    return weights


def autocast_dtype(operand: Any) -> torch.dtype | None:
    """The dtype to which PyTorch's products cast such operands; None without autocast for their device."""
    if not torch._C._is_any_autocast_enabled():  # faster than to ask for one device
        return None
    if not isinstance(operand, Tensor) or not (operand.is_cuda or operand.is_cpu):
        return None
    device = "cuda" if operand.is_cuda else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast(dtype: torch.dtype, *operands: Any) -> tuple[Any, ...]:
    """Operands in that dtype, as autocast casts them: float64 is left as it is."""
    return tuple(
        each.to(dtype)
        if isinstance(each, Tensor) and each.is_floating_point() and each.dtype != torch.float64
        else each
        for each in operands
    )


def is_on_gpu(tensor: Any) -> bool:
    """Whether it is a strided tensor on a GPU, or a fake tensor on a GPU that exists.

    Other classes, such as DTensor, implement PyTorch's operators and not ours.
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
    """Makes a GPU the current one for launches. If it is already, as it mostly is, that costs almost nothing."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device(device)


def is_plain(*tensors: Tensor) -> bool:
    """Whether a call can bypass the operator: it is neither traced nor transformed, and all tensors are plain.

    A lazily negated tensor is not plain, since its memory has the opposite signs. A tensor that outlived a transform of
    torch.func is still wrapped, and has no memory of its own.
    """
    if maybe_current_level() is not None or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack() > 0:  # a mode wants to see every operator
        return False
    for tensor in tensors:  # a loop is faster than all() of a generator
        if type(tensor) not in _PLAIN or tensor.is_meta or tensor.is_neg() or is_functorch_wrapped_tensor(tensor):
            return False
    return True


def is_batched(gradient: Tensor) -> bool:
    """Whether torch.autograd.grad batched it (``is_grads_batched``), which uses a vmap of its own."""
    return torch._C._dispatch_keys(gradient).has(_BATCHED)


def refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    """NotImplementedError, with a remedy, if torch.func.grad or its like track a tensor.

    Our operators would raise PyTorch's error, without a remedy. Called only for calls that are not plain or have
    failed, since it takes time.
    """
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and _is_followed(tensor) for tensor in tensors):
        raise NotImplementedError(f"{name} has no derivative for torch.func's grad and vjp: pass backend='torch'")


def _is_followed(tensor: Tensor) -> bool:
    while is_functorch_wrapped_tensor(tensor):  # nested transforms wrap it several times
        if is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    return False


def refuse_tangents(name: str, *tensors: Tensor) -> None:
    """NotImplementedError if a forward-mode derivative or one of torch.func is active.

    Operators in Python would silently lose a forward-mode derivative.
    """
    if maybe_current_level() is not None:
        refuse_gradients(f"the Triton {name}", *tensors)
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(f"the Triton {name} has no forward-mode derivative: pass backend='torch'")


def wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

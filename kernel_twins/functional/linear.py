"""``kernel_twins.linear``: a linear layer with its activation, fused, or PyTorch's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from kernel_twins import ops
from kernel_twins._load import UnavailableError, extension
from kernel_twins.ceilings import gpu_slug
from kernel_twins.functional.activations import ACTIVATIONS
from kernel_twins.functional.choice import nearest
from kernel_twins.functional.matmul import require_gpu
from kernel_twins.spec import Case
from kernel_twins.tensors import name_of

BACKENDS = ("auto", "cuda", "triton", "torch")
_HALF = (torch.bfloat16, torch.float16)
_cuda_operator: Callable[..., Tensor] | None = None
_no_cuda = ""
try:
    extension()
    _cuda_operator = torch.ops.kernel_twins.linear.default
except UnavailableError as _error:
    _no_cuda = str(_error)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, backend: str = "auto"
) -> Tensor:
    """``activation(x @ weight.T + bias)`` for x: [..., K], weight: [N, K] and bias: [N], all of one dtype and device.

    ``activation`` is None, "relu", "gelu", "gelu_tanh" or "silu". The CUDA and Triton backends sum in fp32 and apply
    bias and activation before they round (on GPUs before 9.0, and for float32 operands, after). For gelu, gelu_tanh and
    silu the forward pass also stores what the activation was applied to, where a gradient is wanted.

    ``backend``: "cuda", "triton", "torch", or "auto": for bfloat16 and float16 on a GPU of compute capability 9.0 the
    fastest in this GPU's committed measurements at the nearest sizes ("cuda" where there are none, and under
    torch.compile), else PyTorch.

    TypeError or ValueError names the argument at fault; UnavailableError says what a backend lacks.
    """
    name = activation or "none"
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be None or one of {', '.join(ACTIVATIONS)}")
    if backend == "auto":
        backend = _choose(x, weight, name)
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(f"{_no_cuda}, or pass backend='torch'")
        require_gpu("x", x, backend)
        return _cuda_operator(x, weight, bias, name)
    if backend == "triton":
        return _triton()(x, weight, bias, name)
    if backend == "torch":
        return ACTIVATIONS[name](functional.linear(x, weight, bias))
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


def _choose(x: Tensor, weight: Tensor, activation: str) -> str:
    """The backend for these operands. What is wrong with them PyTorch may say: its words are known."""
    if not (isinstance(x, Tensor) and x.is_cuda and x.dtype in _HALF and _runs(x.device.index)):
        return "torch"
    if torch.compiler.is_compiling():
        return "cuda"
    if not (isinstance(weight, Tensor) and weight.dim() == 2 and x.dim() > 0):
        return "torch"
    return _choice((x.shape[:-1].numel(), *weight.shape), name_of(x.dtype), activation, x.device.index)


@torch.compiler.assume_constant_result
def _runs(device: int) -> bool:
    """Whether there is an extension, and a GPU that runs the fused step."""
    return _cuda_operator is not None and ops.get("linear").step("v01_fused").runs_on(
        torch.cuda.get_device_capability(device)
    )


@lru_cache(maxsize=4096)
def _choice(shape: tuple[int, int, int], dtype: str, activation: str, device: int) -> str:
    if 0 in shape:
        return "torch"
    gpu = gpu_slug(torch.cuda.get_device_name(device))
    copyable = shape[1] % 8 == shape[2] % 8 == 0
    best = nearest(gpu, "linear", Case(shape, dtype, (("act", activation),) if activation != "none" else ()), copyable)
    if best == "triton" and importlib.util.find_spec("triton") is None:
        return "cuda"
    return best or "cuda"


@cache
def _triton() -> Callable[[Tensor, Tensor, Tensor | None, str], Tensor]:
    try:
        from kernel_twins.functional import triton_linear
    except ImportError as error:
        raise UnavailableError("the Triton side is missing: pip install triton, or pass backend='torch'") from error
    return triton_linear.linear

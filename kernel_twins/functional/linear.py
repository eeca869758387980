"""``kernel_twins.linear``: a linear layer with its activation, fused, or PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernel_twins._load import UnavailableError, extension
from kernel_twins.functional.matmul import require_gpu

BACKENDS = ("auto", "cuda", "torch")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}

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

    ``activation`` is None, "relu", "gelu", "gelu_tanh" or "silu". The CUDA backend sums in fp32 and applies bias and
    activation before it rounds (on GPUs before 9.0, and for float32 operands, after). For gelu, gelu_tanh and silu the
    forward pass also stores what the activation was applied to, where a gradient is wanted.

    ``backend`` is "cuda", "torch" or "auto": "cuda" for bfloat16 and float16 on a GPU of compute capability 9.0.
    TypeError or ValueError names the argument at fault.
    """
    name = activation or "none"
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be None or one of {', '.join(ACTIVATIONS)}")
    if backend == "auto":
        backend = "cuda" if _serves(x) else "torch"
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(f"{_no_cuda}, or pass backend='torch'")
        require_gpu("x", x, backend)
        return _cuda_operator(x, weight, bias, name)
    if backend == "torch":
        return ACTIVATIONS[name](functional.linear(x, weight, bias))
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


def _serves(x: Tensor) -> bool:
    """Whether the fused step takes it. Nothing was measured yet."""
    half = isinstance(x, Tensor) and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return half and _cuda_operator is not None and torch.cuda.get_device_capability(x.device) == (9, 0)

"""``kernel_twins.linear``: a linear layer with its activation, fused, or PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kernel_twins.errors import UnavailableError
from kernel_twins.functional.backends import (
    BACKENDS,
    HALF,
    autocast_dtype,
    cast,
    constant,
    cuda_operator,
    expected,
    is_differentiated,
    is_on_gpu,
    is_static,
    narrowed,
    refuse_gradients,
    register_vmap,
    require_gpu,
    require_tensors,
    runs_of,
    triton_side,
    wants_gradient,
)
from kernel_twins.functional.expected import product
from kernel_twins.functional.kept import CAST, EMPTY, NO_PLAIN, TRANSFORMED, kept, left
from kernel_twins.functional.matmul.batching import backward_rule, linear_rule
from kernel_twins.functional.matmul.shared import Place, copyable, place
from kernel_twins.ops.activations import ACTIVATIONS

_cuda_operator, _no_cuda = cuda_operator("linear")
_runs = runs_of(_cuda_operator, "linear")
if _cuda_operator is not None:
    _product = torch.ops.kernel_twins.matmul.default
    register_vmap("linear", partial(linear_rule, product=_product))
    register_vmap("linear_saving", partial(linear_rule, product=_product, saves=True))
    register_vmap("linear_backward", backward_rule)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, backend: str = "auto"
) -> Tensor:
    """``activation(x @ weight.T + bias)`` for x: [..., K], weight: [N, K] and bias: [N], all on one device.

    They are float32, bfloat16 or float16, of one dtype, which the result has. A float32 weight or bias of a
    half-precision x is rounded to x's dtype, and its gradient is float32. Under autocast all operands are first cast to
    its dtype, as torch's linear casts them: by "cuda" and "triton" in each call, while PyTorch, which "auto" takes
    then, keeps its casts of parameters.

    ``activation`` is None or "none", "relu", "gelu", "gelu_tanh" or "silu". The CUDA and Triton backends sum in fp32
    and apply bias and activation before they round (on GPUs before 9.0, and for float32 operands, after). For gelu,
    gelu_tanh and silu the forward pass also stores the activation's input, if a gradient is needed. There is no forward
    mode. torch.func.vmap makes of its examples more rows of x or of weight; if both are batched, or only bias is, bias
    and activation are applied after the product is rounded.

    ``backend``: "cuda", "triton", "torch", or "auto". For bfloat16 and float16 on a GPU of compute capability 9.0,
    "auto" is the one that is expected to be the fastest, as for ``matmul`` ("cuda" if there are no measurements of this
    GPU). Elsewhere, and for forward mode and torch.func's derivatives, it is PyTorch.

    TypeError or ValueError names the argument at fault; UnavailableError says what a backend lacks.
    """
    name = "none" if activation is None else activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be None or one of {', '.join(ACTIVATIONS)}")
    to = autocast_dtype(x)
    if to is None:
        weight, bias = narrowed(x, weight, bias)  # type: ignore[assignment]
    elif backend in ("cuda", "triton"):
        x, weight, bias = cast(to, x, weight, bias)
    if backend == "auto":
        backend = _kept(x, weight, bias, name, to)
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(_no_cuda)
        require_gpu("x", x, backend)
        try:
            return _cuda_operator(x, weight, bias, name)
        except RuntimeError:  # the dispatcher raises it, too
            require_gpu("weight", weight, backend)
            require_tensors(None, None, bias)
            refuse_gradients("kernel_twins.linear", x, weight, bias)
            raise
    if backend == "triton":
        return _by_triton()(x, weight, bias, name)
    if backend == "torch":
        return ACTIVATIONS[name](functional.linear(x, weight, bias))
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


@triton_side
def _by_triton() -> Callable[[Tensor, Tensor, Tensor | None, str], Tensor]:
    from kernel_twins.functional.matmul import triton_linear

    return triton_linear.linear


def _choose(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, to: torch.dtype | None = None) -> str:
    """The backend for these operands. PyTorch gets wrong ones, and those that autocast casts ``to`` another dtype."""
    if not is_on_gpu(x):
        return left(NO_PLAIN)
    dtype, device = x.dtype, x.device
    if to not in (None, dtype):
        return left(CAST)
    others = (weight,) if bias is None else (weight, bias)
    if not all(is_on_gpu(each) and each.device == device for each in others):
        return left(NO_PLAIN)
    if any(each.dtype != dtype for each in others):
        return left(NO_PLAIN if to is None else CAST)
    if dtype not in HALF or x.dim() == 0 or weight.dim() != 2:
        return left(NO_PLAIN)
    if is_differentiated():
        return left(TRANSFORMED)
    differentiated = wants_gradient(x, *others)
    tracing = torch.compiler.is_compiling()
    if tracing and not is_static(x, weight):
        return _any_choice(device.index, differentiated)
    if not tracing and torch._C._len_torch_dispatch_stack() > 0:  # sizes may be symbols
        return "cuda" if _runs("cuda", device.index) else "torch"
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    return _choice(place(rows), place(weight), dtype, activation, device.index, differentiated, tracing)


_kept = kept(_choose)


@constant
def _any_choice(device: int, differentiated: bool) -> str:
    """The choice in a trace with sizes that are symbols."""
    return expected("linear", None, device, _runs, differentiated=differentiated, traced=True)


@constant
def _choice(
    x: Place,
    weight: Place,
    dtype: torch.dtype,
    activation: str,
    device: int,
    differentiated: bool,
    traced: bool = False,
) -> str:
    (x_shape, *_), ((n, k), (row, col), _) = x, weight
    shape = math.prod(x_shape[:-1]), n, k
    if 0 in shape:
        return left(EMPTY)
    itemsize = dtype.itemsize
    copied = n * itemsize % 16 == 0 and copyable(x, itemsize) and copyable(weight, itemsize)
    options = ("act",) if activation != "none" else ()
    problem = product(*shape, itemsize, copied=copied, column_major=row == 1 != col, options=options)
    return expected("linear", problem, device, _runs, differentiated=differentiated, traced=traced)

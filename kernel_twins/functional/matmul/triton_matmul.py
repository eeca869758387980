"""The Triton side of ``kernel_twins.matmul``: torch.ops.kernel_twins.matmul_triton."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from kernel_twins.functional.backends import (
    is_batched,
    is_plain,
    on_device,
    refuse_tangents,
    require_gpu,
    triton_launcher,
    wants_gradient,
)
from kernel_twins.functional.matmul.batching import product_rule
from kernel_twins.functional.matmul.shared import product_sizes, require_out_dtype
from kernel_twins.functional.triton_operator import differentiable, register
from kernel_twins.ops.tensors import require_device, require_dtype, require_same_dtype

LEAST_K = 1024  # from this K on, a batch's product hides the next one's launch; matmul/torch.cpp has the same number


def matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """The product of tensors on a GPU by the last Triton step."""
    if not torch.compiler.is_compiling() and not triton.knobs.runtime.interpret:  # Triton's knobs cannot be traced
        require_gpu("a", a, "triton")
        require_gpu("b", b, "triton")
    return product(a, b, out_dtype)


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The same, also for meta tensors. It bypasses the operator, which is slow to dispatch, if it can."""
    if torch.compiler.is_compiling():
        return operator(a, b, out_dtype)
    if not is_plain(a, b):
        refuse_tangents("matmul", a, b)
        return operator(a, b, out_dtype)
    return (_differentiable if wants_gradient(a, b) else _compute)(a, b, out_dtype)


def product_with(dout: Tensor) -> Callable[..., Tensor]:
    """``product`` of a gradient; the operator if the gradient is batched, since only that has a batching rule."""
    return operator if torch.compiler.is_compiling() or is_batched(dout) else product


def _compute(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    dtype = _check(a, b, out_dtype)
    m, n, k, batch, shape = product_sizes(a.shape, b.shape)
    out = torch.empty(shape, dtype=dtype, device=a.device)
    if out.numel() == 0:
        return out
    if k == 0:
        return out.zero_()
    left, right = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    if right.numel() == k * n:  # one b for all: the batch is more rows of a
        launch = _launcher(a)
        with on_device(a.device):
            launch(_rows(left, k), _rows(right, n), out=_rows(out, n))
        return out
    left, right = left.expand(*batch, m, k), right.expand(*batch, k, n)
    if not _worth_a_launch_each(m, n, k, a.device):
        target, left, right = out.view(-1, m, n), left.reshape(-1, m, k), right.reshape(-1, k, n)
        if dtype == a.dtype:
            torch.bmm(left, right, out=target)
        else:
            torch.bmm(left, right, out_dtype=dtype, out=target)
        return out
    launch = _launcher(a)
    with on_device(a.device):
        for index in itertools.product(*map(range, batch)):
            launch(left[index], right[index], out=out.view(*batch, m, n)[index])
    return out


def _rows(tensor: Tensor, cols: int) -> Tensor:
    """[..., cols] as a matrix. A matrix is returned as it is, because reshape takes time even then."""
    return tensor if tensor.dim() == 2 and tensor.shape[1] == cols else tensor.reshape(-1, cols)


def as_matrix(tensor: Tensor) -> Tensor:
    """All rows of a tensor of 1 or more dimensions. It uses reshape, because flatten fails on batched gradients."""
    # Size.numel would turn a symbol into a number, and so compile a graph for every number of rows.
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _check(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The result's dtype; TypeError or ValueError if a and b do not fit together."""
    for name, tensor in (("a", a), ("b", b)):
        require_dtype(name, tensor, "fp32", "bf16", "fp16")
        if tensor.dim() == 0:
            raise ValueError(f"{name} has 0 dimensions, must have 1 or more: multiply by it with *")
    require_same_dtype("b", b, "a", a)
    require_device("b", b, "a", a)
    if out_dtype is None:
        return a.dtype
    require_out_dtype(a, out_dtype)
    return out_dtype


def _worth_a_launch_each(m: int, n: int, k: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    tiles = triton.cdiv(m, 128) * triton.cdiv(n, 256)
    return k >= LEAST_K and tiles >= torch.cuda.get_device_properties(device).multi_processor_count


def _launcher(a: Tensor) -> Callable[..., None]:
    op = "matmul_fp32" if a.dtype == torch.float32 else "matmul_bf16"
    return triton_launcher(op, a.device.index if a.is_cuda else None)


def _fake(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(product_sizes(a.shape, b.shape)[-1], dtype=_check(a, b, out_dtype), device=a.device)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype | None], output: Tensor) -> None:
    """Saves an operand only if the other one's gradient is needed; for its own gradient its sizes suffice."""
    a, b, _ = inputs
    a_grad, b_grad, *_ = ctx.needs_input_grad
    ctx.a_shape, ctx.b_shape, ctx.dtype = a.shape, b.shape, a.dtype
    ctx.save_for_backward(a if b_grad else None, b if a_grad else None)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """da = dout @ b.mT, db = a.mT @ dout, in the operands' dtype, summed over broadcast dimensions."""
    a, b = ctx.saved_tensors
    a_shape, b_shape = ctx.a_shape, ctx.b_shape
    multiply = product_with(dout)
    dout = dout.to(ctx.dtype)
    dout = dout.unsqueeze(-1) if len(b_shape) == 1 else dout
    dout = dout.unsqueeze(-2) if len(a_shape) == 1 else dout
    da = db = None
    if b is not None:
        right = b.unsqueeze(1) if b.dim() == 1 else b
        rows = (1, *a_shape) if len(a_shape) == 1 else a_shape
        da = multiply(dout, right.mT).sum_to_size(rows).view(a_shape)
    if a is not None:
        left = a.unsqueeze(0) if a.dim() == 1 else a
        if len(b_shape) <= 2 and left.dim() > 2:
            # One b for the whole batch: the product over all rows sums its gradient over the batch.
            db = multiply(as_matrix(left).mT, as_matrix(dout)).view(b_shape)
        else:
            columns = (*b_shape, 1) if len(b_shape) == 1 else b_shape
            db = multiply(left.mT, dout).sum_to_size(columns).view(b_shape)
    return da, db, None


operator = register(
    "matmul_triton",
    _compute,
    "(Tensor a, Tensor b, ScalarType? out_dtype=None) -> Tensor",
    _fake,
    gradient=(_save, _backward),
    vmap=product_rule,
)
_differentiable = differentiable("_Product", _compute, _save, _backward)

"""The Triton side of ``kernel_twins.attention``: torch.ops.kernel_twins.attention_triton and its gradient."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from kernel_twins.functional.attention import gradient
from kernel_twins.functional.attention.shared import (
    BEFORE_ALL,
    BEHIND_ALL,
    Options,
    Shape,
    aligned,
    autocast_operands,
    batching_rule,
    empty_results,
    is_served,
    require_served,
    require_shapes,
)
from kernel_twins.functional.backends import (
    is_plain,
    on_device,
    refuse_tangents,
    require_gpu,
    triton_launcher,
    wants_gradient,
)
from kernel_twins.functional.triton_operator import differentiable, goes_past, register
from kernel_twins.ops.attention.shared import require_starts
from kernel_twins.ops.tensors import require_device, require_dtype, require_same_dtype, require_shape

Results = tuple[Tensor, Tensor]  # the result and lse
Starts = Tensor | None

_OPTIONS = (
    f"float? scale=None, int first={BEFORE_ALL}, int last={BEHIND_ALL}, bool from_end=False, float softcap=0.0, "
    "bool deterministic=False"
)


def require_gpu_or_interpreter(name: str, first: Any) -> None:
    if not torch.compiler.is_compiling() and not triton.knobs.runtime.interpret:
        require_gpu(name, first, "triton")


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Starts, cu_seqlens_k: Starts, options: Options, _: bool
) -> Results:
    """Runs the last Triton step; bypasses the operator, which is slow to dispatch, if it can."""
    q, k, v = autocast_operands(q, k, v)
    given = q, k, v, cu_seqlens_q, cu_seqlens_k, *options
    starts = () if cu_seqlens_q is None or cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    out: Results
    if torch.compiler.is_compiling():  # Triton launches cannot be traced
        out = operator(*given)
    elif not is_plain(q, k, v, *starts):
        refuse_tangents("attention", q, k, v)
        out = operator(*given)
    else:
        out = (_differentiable if wants_gradient(q, k, v) else _compute)(*given)
    return out


def _compute(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Starts = None, cu_seqlens_k: Starts = None, *options: Any
) -> Results:
    if cu_seqlens_q is not None or cu_seqlens_k is not None or not _fit(q, k, v):
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    asked = Options(*options)
    out, lse = empty_results(q, cu_seqlens_q is not None)
    if out.numel() > 0:
        with on_device(q.device):
            triton_launcher("attention", q.device.index)(
                aligned(q),
                aligned(k),
                aligned(v),
                None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
                None if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
                out=(out, lse),
                scale=asked.scale,
                band=(asked.first, asked.last),
                softcap=asked.softcap or None,
                from_end=asked.from_end,
            )
    return out, lse


def _compute_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts,
    *asked: Any,
) -> gradient.Gradients:
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    _check_gradient(dout, dlse, q, out, lse)
    with on_device(q.device):
        return gradient.backward(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *_parted(asked))


def _parted(asked: tuple[Any, ...]) -> tuple[Options, gradient.Wanted]:
    """The gradient operator's arguments that are no tensors; the dispatcher drops trailing defaults."""
    behind = len(Options._fields)
    return Options(*asked[:behind]), gradient.Wanted(*asked[behind:])


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether ``_check`` accepts dense operands; faster, but without a message."""
    dtype, device = q.dtype, q.device
    if not (k.dtype == dtype and v.dtype == dtype and k.device == device and v.device == device):
        return False
    return _shapes_fit(q.shape, k.shape, v.shape, dtype)


@lru_cache(maxsize=4096)
def _shapes_fit(q: Shape, k: Shape, v: Shape, dtype: torch.dtype) -> bool:
    return len(q) == len(k) == len(v) == 4 and is_served(q, k, v, dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Starts, cu_seqlens_k: Starts) -> None:
    """TypeError or ValueError if an operator's arguments do not fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, must have 4, [B, H, S, D]")
    require_shapes(q, k, v)
    require_served(q, k, v)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given both, or neither")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        require_starts("cu_seqlens_q", cu_seqlens_q, q)
        require_starts("cu_seqlens_k", cu_seqlens_k, q)
        if q.shape[0] != 1:
            raise ValueError(f"q has a batch of {q.shape[0]}, must have 1 with cu_seqlens_q: pass the tokens as rows")


def _check_gradient(dout: Tensor, dlse: Tensor | None, q: Tensor, out: Tensor, lse: Tensor) -> None:
    """TypeError or ValueError if the results and their gradients are not those of q."""
    for name, rows in (("dout", dout), ("out", out)):
        require_same_dtype(name, rows, "q", q)
        require_device(name, rows, "q", q)
        require_shape(name, rows, tuple(q.shape), "it has a row for each of q's")
    for name, numbers in (("lse", lse), *(() if dlse is None else (("dlse", dlse),))):
        require_dtype(name, numbers, "fp32")
        require_device(name, numbers, "q", q)
        require_shape(name, numbers, tuple(q.shape[:3]), "it has a number for each query")


# ----------------------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------------------


def _fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Starts = None, cu_seqlens_k: Starts = None, *options: Any
) -> Results:
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    return empty_results(q, False)


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts,
    *asked: Any,
) -> gradient.Gradients:
    _, wanted = _parted(asked)
    empty = gradient.empty_or_none
    return empty(q, wanted.q), empty(k, wanted.k), empty(v, wanted.v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (2 + len(ctx.options))
    if dout is None and dlse is None:
        return None, None, None, *nothing
    q, k, v, out, lse, *starts = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    # The operator refuses to be differentiated, and so it is asked where that may come.
    past = goes_past("attention_backward", *((dout,) if dlse is None else (dout, dlse)))
    run = _compute_backward if past and not torch.is_grad_enabled() else backward_operator
    wanted = ctx.needs_input_grad[:3]
    options = Options(*ctx.options)  # the dispatcher drops trailing defaults
    found = run(dout, dlse, q, k, v, out, lse, *starts, *options, *wanted)
    return *(each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)), *nothing


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("the Triton attention has no gradient of its gradient: pass backend='torch'")


operator = register(
    "attention_triton",
    _compute,
    f"(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, {_OPTIONS}) "
    "-> (Tensor, Tensor)",
    _fake,
    gradient=(_save, _backward),
    vmap=partial(batching_rule, operands=3),
)
backward_operator = register(
    "attention_backward_triton",
    _compute_backward,
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? cu_seqlens_q, "
    f"Tensor? cu_seqlens_k, {_OPTIONS}, bool q_grad=True, bool k_grad=True, bool v_grad=True) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_backward,
    gradient=(lambda ctx, inputs, output: None, _refuse),
    vmap=partial(batching_rule, operands=7),
)
_differentiable = differentiable("_Attention", _compute, _save, _backward)

"""The baselines of attention's gradients: PyTorch's kernels by name, FlexAttention, and FlashAttention-4."""

from __future__ import annotations

import functools
import math
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from kernel_twins.errors import UnavailableError
from kernel_twins.ops.attention import sdpa
from kernel_twins.ops.attention.flash4 import window_of
from kernel_twins.ops.attention.shared import Band
from kernel_twins.ops.baselines import environment_kept, imported
from kernel_twins.spec import Case

if TYPE_CHECKING:
    from torch import Tensor

    Gradients = tuple[Tensor, Tensor, Tensor]


def differs(baseline: str, case: Case) -> str:
    """Kernels hide keys before they scale scores, so that a negative scale makes inf of -inf.

    FlexAttention rounds each row's sum of dout times out to 16 bits. That shows where a row has few keys: in fp16, or
    among many rows.
    """
    if baseline == "compile" and case.get("mask") in ("causal", "top"):
        many = math.prod(case.shape[:3]) > 10**4
        return "a row's sum is rounded to 16 bits" if many or case.dtype == "fp16" else ""
    # cuDNN's causal kernel and FlexAttention scale first.
    hides = baseline in ("torch", "flash4") or (baseline == "cudnn" and not case.get("mask"))
    return "a negative scale makes NaN" if case.get("scale") == "neg" and hides else ""


def _require(name: str, q: Tensor, dlse: Tensor | None, starts: tuple[Tensor, ...], softcap: float | None) -> None:
    if not q.is_cuda:
        raise UnavailableError(f"{name} is for tensors on a GPU")
    sdpa.refuse(name, starts, softcap)
    if dlse is not None:
        raise UnavailableError(f"{name} takes no gradient of the rows' logarithms")


def flash(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *starts: Tensor,
    out: Any,
    scale: float,
    band: Band,
    softcap: float | None = None,
    from_end: bool = False,
    deterministic: bool = False,
) -> Gradients:
    """PyTorch's FlashAttention-2 kernel, which takes what the forward pass saved, and windows."""
    import torch

    _require("PyTorch's FlashAttention-2", q, dlse, starts, softcap)
    before, behind = window_of(band, q.shape[2], k.shape[2], False)
    if min(before or 0, behind or 0) < 0 or 0 in (*q.shape, *k.shape):
        raise UnavailableError("PyTorch's FlashAttention-2 takes windows that hold the query's own key")
    if not all(map(sdpa.is_aligned, (dout, q, k, v, result))):
        raise UnavailableError("PyTorch's FlashAttention-2 takes rows that start at multiples of 16 bytes")
    none = q.new_empty(0, dtype=torch.int64)  # the state of its dropout
    found = torch.ops.aten._flash_attention_backward(
        *(each.transpose(1, 2) for each in (dout, q, k, v, result)),
        lse.masked_fill(lse == -math.inf, math.inf),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        before is None and behind == 0,
        none,
        none,
        scale=scale,
        window_size_left=-1 if before is None else before,
        window_size_right=-1 if behind is None else behind,
    )
    dq, dk, dv = (each.transpose(1, 2) for each in found)
    return dq, dk, dv


def cudnn(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *starts: Tensor,
    out: Any,
    scale: float,
    band: Band,
    softcap: float | None = None,
    from_end: bool = False,
    deterministic: bool = False,
) -> Gradients:
    """cuDNN's kernel behind scaled_dot_product_attention: every key, or as many as PyTorch's ``is_causal`` shows."""
    import torch

    _require("cuDNN", q, dlse, starts, softcap)
    full = sdpa.is_full(band, q, k)
    if not (full or sdpa.is_causal(band, q)) or 0 in (*q.shape, *k.shape):
        raise UnavailableError("cuDNN is called without a mask, or with PyTorch's is_causal")
    if not all(map(sdpa.is_aligned, (dout, q, k, v, result))):
        raise UnavailableError("cuDNN takes rows that start at multiples of 16 bytes")
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of its dropout
    try:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, result, lse[..., None], none, none, None, None, None, q.shape[2], k.shape[2], 0.0,
            not full, scale=scale,
        )  # fmt: skip
    except RuntimeError as error:
        raise UnavailableError("cuDNN does not take these operands") from error
    return dq, dk, dv


_flex = sdpa.flex()


@functools.cache
def _kept() -> MutableMapping[Tensor, dict[tuple[float, Band], tuple[Tensor, tuple[Tensor, ...]]]]:
    """Results and operands of FlexAttention's forward passes, by q, as long as it lives."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def flex(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *starts: Tensor,
    out: Any,
    scale: float,
    band: Band,
    softcap: float | None = None,
    from_end: bool = False,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    """FlexAttention's gradient as torch.compile builds it.

    The first call also runs the forward pass, which is kept. Autograd computes a gradient on the stream of its forward
    pass, which is no default stream, so that later calls can be captured.
    """
    import torch
    from torch._functorch import config  # torch does not import it before it compiles something

    _require("FlexAttention", q, dlse, starts, softcap)
    passes = _kept().setdefault(q, {})
    if (scale, band) not in passes:
        leaves = tuple(each.detach().requires_grad_() for each in (q, k, v))
        current, stream = torch.cuda.current_stream(q.device), torch.cuda.Stream(q.device)
        stream.wait_stream(current)
        # Otherwise the graph could be used once: its gradient would be written into what the forward pass kept.
        kept = config.patch(donated_buffer=False)
        with torch.cuda.stream(stream), torch.enable_grad(), kept:
            passes[scale, band] = _flex(*leaves, out=None, scale=scale, band=band)[0], leaves
        current.wait_stream(stream)
    found, leaves = passes[scale, band]
    with environment_kept():  # the gradient is compiled when it is first asked for
        return torch.autograd.grad(found, leaves, dout, retain_graph=True)


def flash4(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *starts: Tensor,
    out: Any,
    scale: float,
    band: Band,
    softcap: float | None = None,
    from_end: bool = False,
    deterministic: bool = False,
) -> Gradients:
    """FlashAttention-4's kernels for Hopper, by the function behind its autograd."""
    _require("FlashAttention-4", q, None, starts, softcap)
    if q.shape[3] > 128:
        raise UnavailableError("FlashAttention-4 is called for gradients of head dimensions up to 128")
    try:
        module = imported("flash_attn.cute.interface")
    except ImportError as error:
        raise UnavailableError("flash-attn-4 is not installed: pip install flash-attn-4==4.0.0b36") from error
    before, behind = window_of(band, q.shape[2], k.shape[2], False)
    causal = before is None and behind == 0
    found = module._flash_attn_bwd(
        *(each.transpose(1, 2) for each in (q, k, v, result, dout)),
        lse,
        softmax_scale=scale,
        causal=causal,
        window_size_left=None if causal else before,
        window_size_right=None if causal else behind,
        dlse=dlse,
    )
    dq, dk, dv = (each.transpose(1, 2) for each in found[:3])
    return dq, dk, dv

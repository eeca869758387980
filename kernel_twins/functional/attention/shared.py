"""What both sides of attention share: options, checks of tensors, layouts, and the batching rule of torch.func.vmap.

Operators take q: [B, H, Sq, D], k and v: [B, H_KV, Sk, D]. With ``cu_seqlens`` B is 1, and Sq and Sk are the tokens of
all sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_twins.functional.backends import HALF, constant
from kernel_twins.functional.rows import Rule, one_by_one, with_batch
from kernel_twins.ops.attention.shared import LARGEST_D, require_starts
from kernel_twins.ops.tensors import require_device, require_dtype, require_same_dtype

SMALLEST_CAP, LARGEST_CAP = 1e-30, 1e30
BEFORE_ALL, BEHIND_ALL = -(2**31), 2**31 - 1
"""Limits of a band that no tensor's length reaches."""

_ALIGNMENTS = ("bottom-right", "top-left")


class Options(NamedTuple):
    """The operators' arguments that are no tensors, in the order of their schema.

    Query i sees the keys from i + first to i + last; ``from_end`` adds its sequence's keys - queries to both. A
    ``softcap`` of 0 is none. ``deterministic`` concerns the gradient.
    """

    scale: float | None = None
    first: int = BEFORE_ALL
    last: int = BEHIND_ALL
    from_end: bool = False
    softcap: float = 0.0
    deterministic: bool = False

    def scale_of(self, d: int) -> float:
        return 1 / math.sqrt(d) if self.scale is None else self.scale

    def band(self, queries: int, keys: int) -> tuple[int, int]:
        """The limits counted from the first query and key, where there is one sequence."""
        from_end = keys - queries if self.from_end else 0
        return self.first + from_end, self.last + from_end

    def is_full(self, queries: int, keys: int) -> bool:
        """Whether every query sees every key."""
        first, last = self.band(queries, keys)
        return first <= 1 - queries and last >= keys - 1

    def is_causal(self, queries: int, keys: int) -> bool:
        """Whether it is PyTorch's ``is_causal``: query i sees keys 0 to i."""
        first, last = self.band(queries, keys)
        return first <= 1 - queries and last == 0


def options_of(
    causal: bool | str | None,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    scale: float | None,
    deterministic: bool | None,
) -> Options:
    """The options of a public call; TypeError or ValueError names the argument at fault."""
    if not (causal is None or causal is True or causal is False or causal in _ALIGNMENTS):
        raise ValueError(
            f"causal is {causal!r}, must be None, False, True, 'bottom-right' or 'top-left': True is 'bottom-right', "
            "FlashAttention's; 'top-left' is PyTorch's is_causal"
        )
    left, right = (None, None) if window is None else _window(window)
    if causal:
        right = 0
    cap = 0.0 if softcap is None else _number("softcap", softcap)
    if cap != 0 and not SMALLEST_CAP <= cap <= LARGEST_CAP:
        raise ValueError(
            f"softcap is {softcap!r}, must be from {SMALLEST_CAP} to {LARGEST_CAP}, so that fp32 holds its "
            "products: pass None for no softcap"
        )
    return Options(
        scale=None if scale is None else _number("scale", scale),
        first=BEFORE_ALL if left is None else -left,
        last=BEHIND_ALL if right is None else right,
        from_end=causal != "top-left" and not (left is None and right is None),
        softcap=cap,
        deterministic=is_deterministic() if deterministic is None else bool(deterministic),
    )


def is_deterministic() -> bool:
    """Whether PyTorch's own kernels are made to be, rather than to warn that they are not."""
    return torch.are_deterministic_algorithms_enabled() and not _only_warns()


@constant
def _only_warns() -> bool:
    return torch.is_deterministic_algorithms_warn_only_enabled()


def _window(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The keys before and behind a query's own that it sees; None is all."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(_wrong(window, "a window of n keys up to the query's own is (n - 1, 0)"))
    try:
        left, right = (-1 if each is None else index(each) for each in window)
    except TypeError:
        raise TypeError(_wrong(window, "call int on each")) from None
    if min(left, right) < -1:
        raise ValueError(_wrong(window, "-1 is all, too, as in FlashAttention"))
    return (None if left == -1 else min(left, BEHIND_ALL)), (None if right == -1 else min(right, BEHIND_ALL))


def _wrong(window: object, remedy: str) -> str:
    return f"window is {window!r}, must be None or (left, right), each an int from 0 on, or None for all keys: {remedy}"


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}, must be a number or None: call float on it") from None


# ----------------------------------------------------------------------------------------------------------------------
# Checks
# ----------------------------------------------------------------------------------------------------------------------


Names = tuple[str, str, str]
Shape = Sequence[int]
QKV: Names = ("q", "k", "v")  # as a public function calls them in its messages


def require_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    names: Names = QKV,
) -> None:
    """TypeError or ValueError if a public call's tensors do not fit together, as ``attention`` says."""
    for name, tensor in zip(names, (q, k, v), strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, must be a torch.Tensor: call torch.as_tensor({name})"
            )
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        given, lacking = ("k", "q") if cu_seqlens_q is None else ("q", "k")
        raise ValueError(
            f"cu_seqlens_{lacking} is None, must be given with cu_seqlens_{given}: pass the same tensor for both if "
            "sequences have as many keys as queries"
        )
    rank, shape = (4, "[B, H, S, D]") if cu_seqlens_q is None else (3, "[tokens, H, D]")
    for name, tensor in zip(names, (q, k, v), strict=True):
        if tensor.dim() != rank:
            remedy = "drop cu_seqlens_q and cu_seqlens_k" if rank == 3 else "call unsqueeze(0), or pass cu_seqlens_q"
            raise ValueError(f"{name} has {tensor.dim()} dimensions, must have {rank}, {shape}: {remedy}")
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts is not None:
            require_starts(name, starts, q)
    if cu_seqlens_q is not None and cu_seqlens_k is not None and len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_k has {len(cu_seqlens_k)} elements, must have {len(cu_seqlens_q)} like cu_seqlens_q: one for "
            "each sequence and one more"
        )
    require_shapes(q, k, v, names)


def require_shapes(q: Tensor, k: Tensor, v: Tensor, names: Names = QKV) -> None:
    """ValueError if tensors [B, H, S, D], or [tokens, H, D], do not fit together."""
    of_q, of_k, of_v = names
    d, heads, kv_heads = q.shape[-1], q.shape[1], k.shape[1]
    if v.shape != k.shape:
        raise ValueError(
            f"{of_v} has shape {tuple(v.shape)}, must have that of {of_k}, {tuple(k.shape)}: pass a row for each of "
            f"{of_k}'s, and pad a smaller head dimension with zeros"
        )
    if k.shape[-1] != d:
        raise ValueError(f"{of_k} has a head dimension of {k.shape[-1]}, must have {of_q}'s, {d}: pad with zeros")
    if q.dim() == 4 and k.shape[0] != q.shape[0]:
        raise ValueError(f"{of_k} has a batch of {k.shape[0]}, must have {of_q}'s, {q.shape[0]}: call expand")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{of_k} has {kv_heads} heads, must have a number that divides {of_q}'s {heads}: heads are dimension 1 of "
            f"{'[tokens, H, D]' if q.dim() == 3 else '[B, H, S, D]; call transpose(1, 2) on [B, S, H, D]'}"
        )
    for name, tensor in ((of_k, k), (of_v, v)):
        require_device(name, tensor, of_q, q)


def require_floats(q: Tensor, k: Tensor, v: Tensor) -> None:
    """TypeError if operands of ``attention`` are none that PyTorch's operations take."""
    if not q.is_floating_point():
        raise TypeError(f"q is {q.dtype}, must be a floating dtype: call q.to(torch.bfloat16)")
    require_same_dtype("k", k, "q", q)
    require_same_dtype("v", v, "q", q)


def require_served(q: Tensor, k: Tensor, v: Tensor, names: Names = QKV) -> None:
    """TypeError or ValueError if tensors that fit together are none that the kernels take."""
    of_q, *others = names
    require_dtype(of_q, q, "bf16", "fp16")
    for name, tensor in zip(others, (k, v), strict=True):
        require_same_dtype(name, tensor, of_q, q)
    d = q.shape[-1]
    if d % 8 or not 0 < d <= LARGEST_D:
        raise ValueError(
            f"{of_q} has a head dimension of {d}, must have a multiple of 8 up to {LARGEST_D}: pass backend='torch'"
        )


def is_served(q: Shape, k: Shape, v: Shape, dtype: torch.dtype) -> bool:
    """Whether ``require_shapes`` and ``require_served`` accept such operands, whose ranks are right."""
    d, kv_heads = q[-1], k[1]
    if dtype not in HALF or d % 8 or not 0 < d <= LARGEST_D or k != v or k[-1] != d:
        return False
    return kv_heads > 0 and q[1] % kv_heads == 0 and (len(q) == 3 or q[0] == k[0])


# ----------------------------------------------------------------------------------------------------------------------
# Layouts, autocast, batches
# ----------------------------------------------------------------------------------------------------------------------


def aligned(heads: Tensor) -> Tensor:
    """The tensor, or a copy if its rows are no neighbours of elements that start at multiples of 16 bytes."""
    if heads.data_ptr() % 16 == 0 and _has_whole_rows(heads.shape, heads.stride()):
        return heads
    return heads.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=4096)
def _has_whole_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    *outer, last = zip(shape, strides, strict=True)
    return last[1] == 1 and all(size == 1 or stride % 8 == 0 for size, stride in outer)


def empty_heads(like: Tensor) -> Tensor:
    """An empty tensor of that shape. Its heads and rows lie in the same order, one after the other."""
    if like.stride(1) < like.stride(2):
        b, h, s, d = like.shape
        return like.new_empty((b, s, h, d)).transpose(1, 2)
    return torch.empty_like(like, memory_format=torch.contiguous_format)  # faster than torch.empty


def empty_results(q: Tensor, varlen: bool) -> tuple[Tensor, Tensor]:
    """The result and its lse, of variable lengths 0 and -inf, which they stay where a token is in no sequence."""
    out, lse = empty_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    return (out.zero_(), lse.fill_(-math.inf)) if varlen else (out, lse)


def autocast_operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast has scaled_dot_product_attention take them: of its dtype, but for float64."""
    on = tensors[0].device.type
    if tensors[0].is_meta or not torch.is_autocast_enabled(on):  # a meta device has no autocast
        return tensors
    dtype = torch.get_autocast_dtype(on)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )


def batching_rule(operator: Callable[..., tuple[Tensor, ...]], operands: int) -> Rule:
    """A rule for ``torch.library.register_vmap`` of ``operator(*operands, cu_seqlens_q, cu_seqlens_k, *options)``.

    The batch is folded into B, tensors without one are expanded. Variable lengths go example by example.
    """
    each = one_by_one(operator)

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        if any(starts is not None for starts in given[operands : operands + 2]):
            return each(info, in_dims, *given)
        folded = [
            None if tensor is None else with_batch(tensor, at, 0, info.batch_size).flatten(0, 1)
            for tensor, at in zip(given[:operands], in_dims[:operands], strict=True)
        ]
        outs = operator(*folded, *given[operands:])
        parts = tuple(out.unflatten(0, (info.batch_size, out.shape[0] // max(1, info.batch_size))) for out in outs)
        return parts, (0,) * len(parts)

    return rule

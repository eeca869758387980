"""``kernel_twins.attention`` and ``scaled_dot_product_attention``: by the last step of a ladder, or by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernel_twins.errors import UnavailableError
from kernel_twins.functional.attention import torch_attention
from kernel_twins.functional.attention.shared import (
    BEFORE_ALL,
    BEHIND_ALL,
    Options,
    autocast_operands,
    batching_rule,
    is_served,
    options_of,
    require_floats,
    require_operands,
    require_served,
)
from kernel_twins.functional.backends import (
    BACKENDS,
    HALF,
    cuda_operator,
    expected,
    is_differentiated,
    is_on_gpu,
    refuse_gradients,
    register_vmap,
    require_gpu,
    runs_of,
    triton_side,
)
from kernel_twins.functional.expected import attended
from kernel_twins.functional.kept import EMPTY, NO_PLAIN, TRANSFORMED, kept, left
from kernel_twins.ops.tensors import name_of
from kernel_twins.spec import Case

_SDPA = ("query", "key", "value")
_USUAL = Options()

Results = tuple[Tensor, Tensor]  # the result and lse

_cuda_operator, _no_cuda = cuda_operator("attention_result")
_runs = runs_of(_cuda_operator, "attention")
if _cuda_operator is not None:
    register_vmap("attention", partial(batching_rule, operands=3))
    register_vmap("attention_backward", partial(batching_rule, operands=7))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Any:
    """``softmax(scale * q @ k.mT) @ v`` for every head, and for ``return_lse`` the logarithm of each row's sum, too.

    q is [B, H, Sq, D], k and v are [B, H_KV, Sk, D], bfloat16 or float16; H is a multiple of H_KV, and query head h
    reads head h // (H / H_KV). D is a multiple of 8 up to 256. Pass tensors [B, S, H, D] as ``.transpose(1, 2)``: any
    strides are taken, and the result's heads and rows lie in q's order. An operand is copied only if its rows do not
    start at multiples of 16 bytes, or if the elements of a row are no neighbours. lse is the natural logarithm of the
    row's sum of exponentials, float32 [B, H, Sq] (PyTorch takes float64 operands, too, and makes it float64). A query
    that sees no key has the result 0 and the lse -inf.

    - ``causal``: True or "bottom-right" lets the last query see all keys and each one before it one key less, as
      FlashAttention; "top-left" lets query i see keys 0 to i, as PyTorch's ``is_causal``.
    - ``window`` (left, right): a query sees that many keys before and after its own. ``causal`` says which key that is,
      by default as "bottom-right", and makes right 0. None, or -1, is all keys on that side.
    - ``softcap`` c makes c * tanh(score / c) of scaled scores, before the mask (Gemma 2). None, or 0, is none.
    - ``scale`` is of either sign, by default 1 / sqrt(D).
    - ``cu_seqlens_q`` and ``cu_seqlens_k``, int32 [N + 1] on the GPU, say where N sequences begin in q: [tokens, H, D],
      k and v: [keys, H_KV, D], and where the last one ends, as FlashAttention's. lse is then [H, tokens]. A sequence
      may be empty. A token in none has the result 0, the lse -inf and the gradient 0, as the results are cleared first.
      It is not checked that they ascend and end within the tensor, since they are on the GPU.

    The steps of "cuda" and "triton" are FlashAttention's tiled algorithms (Dao et al. 2022; Shah et al. 2024), which
    store no scores: the backward pass computes them again. It makes any of the three gradients without the others. All
    results but q's gradient have the same bits in every call. That one has them with ``deterministic=True``, which
    takes longer, and where PyTorch's deterministic algorithms are on and raise. There is no forward mode, nor a
    gradient of the gradient.

    ``backend``: "cuda", "triton", "torch", or "auto": the one that this GPU's committed measurements let expect to
    be the fastest, interpolated between like sizes and masks, "cuda" if there are none and under torch.compile. "auto"
    takes PyTorch for torch.func's derivatives and forward mode, and for arguments that the others refuse: other dtypes
    and head dimensions, tensors on a CPU or of other classes, and empty ones. "torch" takes
    scaled_dot_product_attention, which decides how the result lies, and otherwise operations that keep all
    probabilities for the gradient. Autocast casts operands to its dtype, as
    PyTorch's.

    TypeError or ValueError names the argument at fault; UnavailableError says what a backend lacks.
    """
    options = options_of(causal, window, softcap, scale, deterministic)
    given = q, k, v, cu_seqlens_q, cu_seqlens_k
    if backend == "auto":
        backend = _kept(*given, options, return_lse)
    compute = _function("q", q, backend)
    if cu_seqlens_q is not None or backend == "torch":  # other operands are checked by the kernels' operators
        require_operands(*given)
    if cu_seqlens_q is not None:  # a batch of one
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    try:
        out, *lse = compute(q, k, v, cu_seqlens_q, cu_seqlens_k, options, return_lse)
    except Exception as error:
        require_operands(*given)
        _refuse_gradients(error, "kernel_twins.attention", backend, q, k, v)
        raise
    if cu_seqlens_q is not None:
        out, lse = out.squeeze(0).transpose(0, 1), [each.squeeze(0) for each in lse]
    return (out, *lse) if return_lse else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``attention`` with the arguments of torch.nn.functional.scaled_dot_product_attention, which say the same.

    ``is_causal`` is ``attention``'s "top-left". Only PyTorch takes an ``attn_mask``, a ``dropout_p`` above 0, other
    ranks than 4, a batch to be broadcast, and values of another head dimension than the queries'; the other backends
    refuse them. A negative ``scale`` is right by every backend. All else is as in ``attention``.
    """
    options = None
    if backend == "auto":
        if attn_mask is None and dropout_p == 0:
            options = _options(is_causal, scale)
        backend = _kept_sdpa(query, key, value, options, enable_gqa)
    if backend == "torch":
        return torch_attention.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    compute = _function("query", query, backend)
    if attn_mask is not None:
        raise ValueError("attn_mask is given, must be None: pass is_causal, or backend='torch'")
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}, must be 0: pass backend='torch'")
    try:
        if not enable_gqa and query.size(1) != key.size(1):
            raise ValueError(f"key has {key.size(1)} heads, must have query's {query.size(1)}: pass enable_gqa=True")
        return compute(query, key, value, None, None, options or _options(is_causal, scale), False)[0]
    except Exception as error:
        require_operands(query, key, value, names=_SDPA)
        if not torch.is_autocast_enabled("cuda"):
            require_served(query, key, value, _SDPA)
        _refuse_gradients(error, "kernel_twins.scaled_dot_product_attention", backend, query, key, value)
        raise


def _options(is_causal: bool, scale: float | None) -> Options:
    return options_of("top-left" if is_causal else None, None, None, scale, None)


def _refuse_gradients(error: Exception, function: str, backend: str, *operands: Tensor) -> None:
    """NotImplementedError, with a remedy, if that is why the CUDA operator raised an error."""
    if backend == "cuda" and isinstance(error, RuntimeError):
        refuse_gradients(function, *operands)


def _function(name: str, first: Any, backend: str) -> Callable[..., tuple[Tensor, ...]]:
    """The backend's call with tensors [B, H, S, D], cu_seqlens, options, and whether lse is wanted.

    All but PyTorch's check dense operands. Their messages may lack the public function's names and remedies.
    """
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(_no_cuda)
        require_gpu(name, first, backend)
        return _by_cuda
    if backend == "triton":
        by_triton = _by_triton()
        by_triton.require_gpu_or_interpreter(name, first)
        compute: Callable[..., tuple[Tensor, ...]] = by_triton.attention
        return compute
    if backend == "torch":
        return _by_torch
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


def _by_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: Options,
    wants_lse: bool,
) -> tuple[Tensor, ...]:
    assert _cuda_operator is not None
    given = q, k, v, cu_seqlens_q, cu_seqlens_k, *options
    if wants_lse:
        both: Results = torch.ops.kernel_twins.attention.default(*given)
        return both
    return (_cuda_operator(*given),)


@triton_side
def _by_triton() -> ModuleType:
    from kernel_twins.functional.attention import triton_attention

    return triton_attention


def _by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: Options,
    wants_lse: bool,
) -> tuple[Tensor, ...]:
    q, k, v = autocast_operands(q, k, v)
    require_floats(q, k, v)
    if cu_seqlens_q is None and not wants_lse:
        out = torch_attention.by_sdpa(q, k, v, options)
        if out is not None:
            return (out,)
    return torch_attention.attention(q, k, v, cu_seqlens_q, cu_seqlens_k, options)


# ----------------------------------------------------------------------------------------------------------------------
# backend="auto"
# ----------------------------------------------------------------------------------------------------------------------


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    options: Options = _USUAL,
    needs_ours: bool = False,
) -> str:
    """The backend for this call. PyTorch gets calls with wrong arguments; ``needs_ours``: it has no kernel for it."""
    if not is_on_gpu(q):
        return left(NO_PLAIN)
    device, varlen = q.device, cu_seqlens_q is not None
    rank = 3 if varlen else 4
    if q.dim() != rank:
        return left(NO_PLAIN)
    for each in (k, v):
        if not (is_on_gpu(each) and each.device == device and each.dim() == rank):
            return left(NO_PLAIN)
    if varlen or cu_seqlens_k is not None:
        for starts in (cu_seqlens_q, cu_seqlens_k):
            if starts is None or not (is_on_gpu(starts) and starts.device == device):
                return left(NO_PLAIN)
    dtype, *others = q.dtype, k.dtype, v.dtype
    if torch.is_autocast_enabled("cuda"):
        dtype, *others = (_cast(each) for each in (dtype, *others))
    if others != [dtype, dtype]:
        return left(NO_PLAIN)
    if is_differentiated():
        return left(TRANSFORMED)
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:  # sizes may be symbols
        served = is_served(q.shape, k.shape, v.shape, dtype)
    elif varlen:  # PyTorch has no kernel for it
        served = is_served(q.shape, k.shape, v.shape, dtype) and q.numel() > 0 and k.numel() > 0
    else:
        return _choice(q.shape, k.shape, v.shape, dtype, options, needs_ours, device.index)
    if not served:
        return left(NO_PLAIN)
    return "cuda" if _runs("cuda", device.index) else "torch"


def _choose_sdpa(query: Tensor, key: Tensor, value: Tensor, options: Options | None, enable_gqa: bool) -> str:
    """The backend for a call with PyTorch's arguments; without ``options`` it has some that are PyTorch's alone."""
    if options is None:
        return left("a mask or dropout is PyTorch's")
    backend = _choose(query, key, value, options=options)
    if backend != "torch" and not enable_gqa and query.size(1) != key.size(1):
        return left("heads differ without enable_gqa")
    return backend


_kept, _kept_sdpa = kept(_choose), kept(_choose_sdpa)


def _cast(dtype: torch.dtype) -> torch.dtype:
    """The dtype that CUDA's autocast makes of an operand's."""
    return torch.get_autocast_dtype("cuda") if dtype in (torch.float32, *HALF) else dtype


def _choice(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    dtype: torch.dtype,
    options: Options,
    needs_ours: bool,
    device: int,
) -> str:
    if 0 in q or 0 in k:
        return left(EMPTY)
    if not is_served(q, k, v, dtype):
        return left(NO_PLAIN)
    (_, heads, queries, _), (_, kv_heads, keys, _) = q, k
    is_sdpa = options.is_full(queries, keys) or options.is_causal(queries, keys)
    needs_ours = needs_ours or options.softcap > 0 or not is_sdpa
    variant = {"kv": str(kv_heads) if kv_heads != heads else "", "keys": str(keys) if keys != queries else ""}
    if options.first == BEFORE_ALL and options.last == 0:
        variant["mask"] = "causal" if options.from_end else "top"
    elif options.first != BEFORE_ALL or options.last != BEHIND_ALL:
        variant["window"] = f"{min(-options.first, keys)}_{min(options.last, keys)}"
    problem = Case.of(*q, dtype=name_of(dtype), **{name: value for name, value in variant.items() if value})
    # Gradients are not timed.
    return expected("attention", attended(problem), device, _runs, differentiated=False, over_torch=needs_ours)

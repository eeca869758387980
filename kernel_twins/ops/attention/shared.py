"""Cases, inputs, reference and costs of attention.

A case is [B, H, S, D]: batch, query heads, queries, head dimension. Its variant says what else tells problems apart:

- ``keys``: keys, where there are not as many as queries; ``kv``: heads of k and v, where several query heads share one.
- ``mask``: ``causal`` aligns the last query with the last key, as FlashAttention does; ``top`` the first with the
  first, as PyTorch's ``is_causal`` does.
- ``window``: ``L_R``, the keys before and behind a query's own that it sees, aligned as ``causal`` is.
- ``scale``: ``neg`` turns the sign of 1 / sqrt(D), ``small`` divides it by 16.
- ``layout``: ``bshd`` for tensors [B, S, H, D] seen as [B, H, S, D], ``pitched`` for rows D + 3 elements apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernel_twins.spec import ITEMSIZE, Case, Output

if TYPE_CHECKING:
    from torch import Generator, Tensor, device

Band = tuple[int, int]
"""Query i sees the keys from i + first to i + last."""

LARGEST_D = 128
_CHUNK = 2**26  # scores held in float64 at a time
_OVERFLOWING = 24.0  # times a query: exponentials of its scores overflow fp32
_BORDER = 8.0


def keys_of(case: Case) -> int:
    return int(case.get("keys", str(case.shape[2])))


def kv_heads_of(case: Case) -> int:
    return int(case.get("kv", str(case.shape[1])))


def band_of(mask: str, window: tuple[int, int] | None, queries: int, keys: int) -> Band:
    """The band of a mask (empty, ``causal`` or ``top``) or of a window; without limits it reaches past every key."""
    aligned = keys - queries
    if window is not None:
        return aligned - window[0], aligned + window[1]
    return -queries, {"": keys, "causal": aligned, "top": 0}[mask]


def options(case: Case) -> dict[str, Any]:
    _, _, queries, d = case.shape
    before, _, behind = case.get("window").partition("_")
    window = (int(before), int(behind)) if before else None
    factor = {"": 1.0, "neg": -1.0, "small": 1 / 16}[case.get("scale")]
    return {
        "scale": factor / math.sqrt(d),
        "band": band_of(case.get("mask"), window, queries, keys_of(case)),
    }


def inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """q: [B, H, Sq, D], k and v: [B, H_KV, Sk, D], standard normal.

    In hostile cases the scores of every other query are so large that their exponentials overflow fp32 unless the
    maximum is subtracted; keys at borders of tiles weigh most, and v has a mean. ``values.nan`` puts a NaN into one
    query.
    """
    from kernel_twins.ops.tensors import borders, normal

    b, h, queries, d = case.shape
    plain = case.but(values="")
    kv = b, kv_heads_of(case), keys_of(case), d

    def laid_out(shape: tuple[int, ...]) -> Tensor:
        b, h, s, d = shape
        if case.get("layout") == "bshd":
            return normal(plain, (b, s, h, d), generator).transpose(1, 2)
        if case.get("layout") == "pitched":
            return normal(plain, (b, h, s, d + 3), generator)[..., :d]
        return normal(plain, shape, generator)

    q, k, v = laid_out((b, h, queries, d)), laid_out(kv), laid_out(kv)
    if case.get("values") == "nan" and q.numel():
        q[b // 2, h // 2, queries // 2, d // 2] = math.nan
    if case.get("values") == "hostile":
        q[:, :, ::2] *= _OVERFLOWING
        places = borders(keys_of(case)).to(v.device)
        k[:, :, places] *= 2
        v[:, :, places] *= _BORDER
        v += 0.25
    return q, k, v


def outputs(case: Case) -> tuple[Output, ...]:
    """The result, and the logarithm of each row's sum of exponentials."""
    return Output(case.shape, case.dtype), Output(case.shape[:3], "fp32")


def accepts(case: Case) -> str:
    if case.dtype not in ("bf16", "fp16"):
        return f"dtype is {case.dtype}, must be bf16 or fp16"
    _, heads, _, d = case.shape
    if d % 8 or not 0 < d <= LARGEST_D:
        return f"head dimension is {d}, must be a multiple of 8 up to {LARGEST_D}"
    if heads % kv_heads_of(case):
        return f"there are {heads} query heads, must be a multiple of the {kv_heads_of(case)} heads of k and v"
    return ""


def copyable(case: Case) -> str:
    """Why the tensor memory accelerator cannot copy a case's tensors; empty if rows start at multiples of 16 bytes."""
    if case.get("layout") == "pitched":
        return "rows are no multiple of 16 bytes apart"
    if int(case.get("offset", "0")) * ITEMSIZE[case.dtype] % 16:
        return f"q starts {case.get('offset')} elements behind a multiple of 16 bytes"
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# Reference
# ----------------------------------------------------------------------------------------------------------------------


def visible(band: Band, queries: int, keys: int, on: device) -> Tensor:
    """[Sq, Sk], true where a query sees a key."""
    import torch

    distance = torch.arange(keys, device=on) - torch.arange(queries, device=on)[:, None]
    within: Tensor = (distance >= band[0]) & (distance <= band[1])
    return within


def _over_heads(
    case: Case, inputs: tuple[Tensor, ...], part: slice, of: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What ``of(scores, p, size, v)`` returns of all queries of some batches, in float64, as [batches, H, Sq, ...].

    scores are masked with -inf, p are their softmax, size is the sum of the absolute terms of each score.
    """
    import torch

    q, k, v = inputs
    scale, band = (options(case)[name] for name in ("scale", "band"))
    _, heads, queries, _ = case.shape
    keys, group = keys_of(case), heads // kv_heads_of(case)
    batches = range(case.shape[0])[part]
    seen_keys = visible(band, queries, keys, q.device)
    step = max(1, _CHUNK // max(1, keys))
    pieces = []
    for b in batches:
        for h in range(heads):
            kh, vh = k[b, h // group].double(), v[b, h // group].double()
            for rows, sees in zip(q[b, h].split(step), seen_keys.split(step), strict=True):
                wide = rows.double()
                scores = (wide @ kh.t() * scale).masked_fill(~sees, -math.inf)
                p = torch.softmax(scores, 1) if keys else scores
                p = p.masked_fill(~sees.any(1, keepdim=True), 0.0)  # a row without keys is 0
                pieces.append(of(scores, p, wide.abs() @ kh.abs().t() * abs(scale), vh))
    return tuple(torch.cat(each).unflatten(0, (len(batches), heads, queries)) for each in zip(*pieces, strict=True))


def reference(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    """A score's rounding error is a relative error of its exponential, so the score's terms count among the result's.

    So does the distance from the row's maximum, which a kernel computes from rounded products.
    """
    from kernel_twins.ops.tensors import chain

    def of(scores: Tensor, p: Tensor, size: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        largest = size.amax(1, keepdim=True) if size.shape[1] else size.sum(1, keepdim=True)
        result = p @ v
        return result, (p * (4 + 2 * size + largest)) @ v.abs() + chain(v.shape[0]) * result.abs()

    result, terms = _over_heads(case, inputs, part, of)
    return result, terms


def deviation(case: Case, inputs: tuple[Tensor, ...], part: slice) -> Tensor:
    """The standard deviation of a result whose exponentials were rounded to v's dtype before they met v."""
    import torch

    from kernel_twins.ops.tensors import DTYPE

    numbers = torch.finfo(DTYPE[case.dtype])

    def of(scores: Tensor, p: Tensor, size: Tensor, v: Tensor) -> tuple[Tensor]:
        # The step between numbers over sqrt(12) is a rounding's standard deviation. It is at most eps times the number,
        # but no less than that between the smallest numbers; a row's largest exponential is 1.
        largest = p.amax(1, keepdim=True) if p.shape[1] else p.sum(1, keepdim=True)
        steps = numbers.eps * torch.maximum(p, numbers.tiny * largest).masked_fill(p == 0, 0.0)
        return (((steps.square() / 12) @ v.square()).sqrt(),)

    (deviation,) = _over_heads(case, inputs, part, of)
    return deviation


def lse_reference(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    """The logarithm of each row's sum, -inf where it sees no key, with the terms of its largest score."""
    import torch

    from kernel_twins.ops.tensors import chain

    def of(scores: Tensor, p: Tensor, size: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not scores.shape[1]:
            return scores.new_full((len(scores),), -math.inf), scores.sum(1)
        lse = torch.logsumexp(scores, 1)
        terms = 4 + chain(scores.shape[1]) + size.amax(1) + lse.abs()
        return lse, terms.masked_fill(lse.isinf(), 0.0)

    lse, terms = _over_heads(case, inputs, part, of)
    return lse, terms


# ----------------------------------------------------------------------------------------------------------------------
# Arguments and costs
# ----------------------------------------------------------------------------------------------------------------------


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: tuple[Tensor, Tensor],
    scale: float | None = None,
    band: Band | None = None,
) -> None:
    """q: [B, H, Sq, D], k and v: [B, H_KV, Sk, D], rows of D neighbours; out: [B, H, Sq, D] and fp32 [B, H, Sq].

    Without them, the scale is 1 / sqrt(D), and every query sees every key.
    """
    from kernel_twins.ops import tensors

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        tensors.require_dtype(name, tensor, "bf16", "fp16")
        tensors.require_same_dtype(name, tensor, "q", q)
        tensors.require_rank(name, tensor, 4)
        tensors.require_device(name, tensor, "q", q)
        if tensor.stride(3) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, the last must be 1: call {name}.contiguous()")
    batch, heads, queries, d = q.shape
    if d % 8 or not 0 < d <= LARGEST_D:
        raise ValueError(f"q has a head dimension of {d}, must be a multiple of 8 up to {LARGEST_D}: pad it with zeros")
    kv_heads = k.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads, must divide q's {heads}: repeat them")
    tensors.require_shape("k", k, (batch, kv_heads, k.shape[2], d), "batch and head dimension are q's")
    tensors.require_shape("v", v, tuple(k.shape), "it has a row for each of k's")
    if not isinstance(out, tuple):
        raise TypeError(f"out is a {type(out).__name__}, must be a tuple of 2 tensors: the result, lse")
    if len(out) != 2:
        raise ValueError(f"out has {len(out)} tensors, must have 2: the result, lse")
    result, lse = out
    for name, tensor in (("out[0]", result), ("out[1]", lse)):
        tensors.require_tensor(name, tensor)
    tensors.require_same_dtype("out[0]", result, "q", q)
    tensors.require_shape("out[0]", result, tuple(q.shape), "it has a row for each query")
    tensors.require_dtype("out[1]", lse, "fp32")
    tensors.require_shape("out[1]", lse, (batch, heads, queries), "it has a number for each query")
    tensors.require_apart(result, "out[1]", lse)
    for name, tensor in (("out[0]", result), ("out[1]", lse)):
        tensors.require_device(name, tensor, "q", q)
        tensors.require_contiguous(name, tensor)
        for other, operand in (("q", q), ("k", k), ("v", v)):
            tensors.require_apart(tensor, other, operand)


def seen(case: Case) -> int:
    """Pairs of a query and a key that it sees, of one head."""
    _, _, queries, _ = case.shape
    keys, (first, last) = keys_of(case), options(case)["band"]
    # FLOPs of a square causal product are told as half of the whole one's, as everybody does.
    if case.get("mask") and keys == queries and not case.get("window"):
        return queries * keys // 2
    return sum(max(0, min(keys - 1, i + last) - max(0, i + first) + 1) for i in range(queries))


def flops(case: Case) -> int:
    """Two products of 2 D operations for each pair."""
    b, h, _, d = case.shape
    return 4 * b * h * seen(case) * d


def minimum_bytes(case: Case) -> int:
    b, h, queries, d = case.shape
    elements = 2 * b * h * queries * d + 2 * b * kv_heads_of(case) * keys_of(case) * d
    return elements * ITEMSIZE[case.dtype] + b * h * queries * 4

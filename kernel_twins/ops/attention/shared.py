"""Cases, inputs, arguments and costs of attention.

A case is [B, H, S, D]: batch, query heads, queries, head dimension. Its variant says what else tells problems apart:

- ``keys``: keys, where there are not as many as queries; ``kv``: heads of k and v, where several query heads share one.
- ``mask``: ``causal`` aligns the last query with the last key, as FlashAttention does; ``top`` the first with the
  first, as PyTorch's ``is_causal`` does.
- ``window``: ``L_R``, the keys before and behind a query's own that it sees, aligned as ``causal`` is.
- ``scale``: ``neg`` turns the sign of 1 / sqrt(D), ``small`` divides it by 16.
- ``cap``: the softcap; scores become cap * tanh(score / cap).
- ``packed``: B sequences of different lengths, up to S queries and ``keys`` keys, lie one behind the other in [1, H,
  tokens, D]. NaN follows the last sequence's keys.
- ``layout``: ``bshd`` for tensors [B, S, H, D] seen as [B, H, S, D], ``pitched`` for rows D + 3 elements apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernel_twins.spec import ITEMSIZE, Case, Output, SizeAxis

if TYPE_CHECKING:
    from torch import Generator, Tensor

Band = tuple[int, int]
"""Query i sees the keys from i + first to i + last."""

LARGEST_D = 256
LARGEST_PLAIN_D = 128
PADDING = 3  # tokens behind the last sequence's keys
_OVERFLOWING = 24.0  # times a query: exponentials of its scores overflow fp32
_BORDER = 8.0


SIZE_AXIS = SizeAxis(
    "S, sequence length",
    lambda case: case.shape[2],
    lambda case: f"D = {case.shape[3]}, {case.get('mask') or 'full'}",
)


def shapes(*dims: int) -> tuple[Case, ...]:
    """Full and causal, with B S = 16,384 and H D = 2,048: sequences of every length cost the same memory."""
    return tuple(
        Case.of(16_384 // s, 2_048 // d, s, d, dtype="bf16", **mask)
        for d in dims
        for s in (512, 1_024, 2_048, 4_096, 8_192, 16_384)
        for mask in ({}, {"mask": "causal"})
    )


def keys_of(case: Case) -> int:
    return int(case.get("keys", str(case.shape[2])))


def kv_heads_of(case: Case) -> int:
    return int(case.get("kv", str(case.shape[1])))


def cap_of(case: Case) -> float | None:
    return float(case.get("cap")) if case.get("cap") else None


def lengths_of(case: Case) -> list[tuple[int, int]]:
    """Queries and keys of each sequence."""
    batch, _, queries, _ = case.shape
    keys = keys_of(case)
    if not case.get("packed"):
        return [(queries, keys)] * batch
    parts = [(5 * n + 3) % 8 for n in range(batch)]  # of 7: none and all are among them
    if case.get("keys"):
        return [(queries * part // 7, keys * ((part + 3) % 8) // 7) for part in parts]
    return [(queries * part // 7,) * 2 for part in parts]


def band_of(mask: str, window: tuple[int, int] | None, queries: int, keys: int) -> Band:
    """The band of a mask (empty, ``causal`` or ``top``) or of a window; without limits it reaches past every key."""
    aligned = keys - queries
    if window is not None:
        return aligned - window[0], aligned + window[1]
    return -queries, {"": keys, "causal": aligned, "top": 0}[mask]


def _window_of(case: Case) -> tuple[int, int] | None:
    before, _, behind = case.get("window").partition("_")
    return (int(before), int(behind)) if before else None


def band_in(case: Case, queries: int, keys: int) -> Band:
    """The band of a sequence of that length."""
    return band_of(case.get("mask"), _window_of(case), queries, keys)


def options(case: Case) -> dict[str, Any]:
    _, _, queries, d = case.shape
    factor = {"": 1.0, "neg": -1.0, "small": 1 / 16}[case.get("scale")]
    given: dict[str, Any] = {"scale": factor / math.sqrt(d), "band": band_in(case, queries, keys_of(case))}
    if case.get("packed"):
        longest = max(queries, keys_of(case))
        given |= {"band": band_in(case, longest, longest), "from_end": case.get("mask") != "top"}
    return given | ({"softcap": cap_of(case)} if case.get("cap") else {})


def inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """q: [B, H, Sq, D], k and v: [B, H_KV, Sk, D], standard normal; of packed sequences their starts, too.

    In hostile cases the scores of every other query are so large that their exponentials overflow fp32 unless the
    maximum is subtracted; keys at borders of tiles weigh most, and v has a mean. ``values.nan`` puts a NaN into one
    query.
    """
    import torch

    from kernel_twins.ops.tensors import borders, normal

    b, h, queries, d = case.shape
    keys, plain, starts = keys_of(case), case.but(values=""), ()
    if case.get("packed"):
        ends = torch.tensor([(0, 0), *lengths_of(case)], device=generator.device).cumsum(0).int()
        starts = tuple(ends.t().contiguous())
        b, queries, keys = 1, int(ends[-1, 0]), int(ends[-1, 1]) + PADDING

    def laid_out(h: int, s: int) -> Tensor:
        if case.get("layout") == "bshd" or case.get("packed"):
            return normal(plain, (b, s, h, d), generator).transpose(1, 2)
        if case.get("layout") == "pitched":
            return normal(plain, (b, h, s, d + 3), generator)[..., :d]
        return normal(plain, (b, h, s, d), generator)

    q, k, v = laid_out(h, queries), laid_out(kv_heads_of(case), keys), laid_out(kv_heads_of(case), keys)
    if case.get("values") == "nan" and q.numel():
        q[b // 2, h // 2, queries // 2, d // 2] = math.nan
    if case.get("values") == "hostile":
        q[:, :, ::2] *= _OVERFLOWING
        places = borders(keys).to(v.device)
        k[:, :, places] *= 2
        v[:, :, places] *= _BORDER
        v += 0.25
    if case.get("packed"):
        for each in (k, v):
            each[:, :, -PADDING:] = math.nan
    return q, k, v, *starts


def outputs(case: Case) -> tuple[Output, ...]:
    """The result, and the logarithm of each row's sum of exponentials."""
    shape = case.shape
    if case.get("packed"):
        shape = 1, shape[1], sum(queries for queries, _ in lengths_of(case)), shape[3]
    return Output(shape, case.dtype), Output(shape[:3], "fp32")


def accepts(case: Case) -> str:
    if case.dtype not in ("bf16", "fp16"):
        return f"dtype is {case.dtype}, must be bf16 or fp16"
    _, heads, _, d = case.shape
    if d % 8 or not 0 < d <= LARGEST_D:
        return f"head dimension is {d}, must be a multiple of 8 up to {LARGEST_D}"
    if heads % kv_heads_of(case):
        return f"there are {heads} query heads, must be a multiple of the {kv_heads_of(case)} heads of k and v"
    return ""


def plain(case: Case) -> str:
    """Why the steps before the last do not serve a case; empty if they do."""
    if case.shape[3] > LARGEST_PLAIN_D:
        return f"head dimension is {case.shape[3]}, this step has registers for up to {LARGEST_PLAIN_D}"
    if case.get("cap"):
        return "this step has no softcap"
    if case.get("deterministic"):
        return "this step has no choice of deterministic sums"
    return "this step has one length for all sequences" if case.get("packed") else ""


def copyable(case: Case) -> str:
    """Why the tensor memory accelerator cannot copy a case's tensors; empty if rows start at multiples of 16 bytes."""
    if case.get("layout") == "pitched":
        return "rows are no multiple of 16 bytes apart"
    if int(case.get("offset", "0")) * ITEMSIZE[case.dtype] % 16:
        return f"q starts {case.get('offset')} elements behind a multiple of 16 bytes"
    return ""


def plain_copyable(case: Case) -> str:
    return plain(case) or copyable(case)


# ----------------------------------------------------------------------------------------------------------------------
# Arguments and costs
# ----------------------------------------------------------------------------------------------------------------------


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor],
    scale: float | None = None,
    band: Band | None = None,
    softcap: float | None = None,
    from_end: bool = False,
) -> None:
    """q: [B, H, Sq, D], k and v: [B, H_KV, Sk, D], rows of D neighbours; out: [B, H, Sq, D] and fp32 [B, H, Sq].

    Without them, the scale is 1 / sqrt(D), and every query sees every key. ``from_end`` adds Sk - Sq to the band. Of
    packed sequences B is 1, and cu_seqlens_q and cu_seqlens_k, int32 [N + 1], are their first tokens.
    """
    from kernel_twins.ops import tensors

    operands = {"q": q, "k": k, "v": v}
    require_rows(operands)
    require_softcap(softcap)
    require_sequences(q, cu_seqlens_q, cu_seqlens_k)
    require_heads(q, k, v, LARGEST_D)
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
    tensors.require_shape("out[1]", lse, tuple(q.shape[:3]), "it has a number for each query")
    tensors.require_apart(result, "out[1]", lse)
    for name, tensor in (("out[0]", result), ("out[1]", lse)):
        tensors.require_device(name, tensor, "q", q)
        tensors.require_contiguous(name, tensor)
        for other, operand in operands.items():
            tensors.require_apart(tensor, other, operand)


def require_rows(operands: Mapping[str, Tensor]) -> None:
    """TypeError or ValueError unless these are [B, heads, S, D] of q's dtype and device, with rows of D neighbours."""
    from kernel_twins.ops import tensors

    q = operands["q"]
    for name, tensor in operands.items():
        tensors.require_dtype(name, tensor, "bf16", "fp16")
        tensors.require_same_dtype(name, tensor, "q", q)
        tensors.require_rank(name, tensor, 4)
        tensors.require_device(name, tensor, "q", q)
        if tensor.stride(3) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, the last must be 1: call {name}.contiguous()")


def require_heads(q: Tensor, k: Tensor, v: Tensor, largest_d: int) -> None:
    """ValueError if q, k and v do not fit together, or have a head dimension that no step takes."""
    from kernel_twins.ops import tensors

    batch, heads, _, d = q.shape
    if d % 8 or not 0 < d <= largest_d:
        raise ValueError(f"q has a head dimension of {d}, must be a multiple of 8 up to {largest_d}: pad it with zeros")
    kv_heads = k.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads, must divide q's {heads}: repeat them")
    tensors.require_shape("k", k, (batch, kv_heads, k.shape[2], d), "batch and head dimension are q's")
    tensors.require_shape("v", v, tuple(k.shape), "it has a row for each of k's")


def require_starts(name: str, starts: Tensor, q: Tensor) -> None:
    """TypeError or ValueError if these cannot be the first tokens of sequences, with the end of the last one."""
    import torch

    from kernel_twins.ops.tensors import require_device

    if not isinstance(starts, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(starts).__name__}, must be a torch.Tensor or None: call torch.tensor({name}, "
            "dtype=torch.int32, device=q.device)"
        )
    if starts.dtype != torch.int32:
        raise TypeError(f"{name} is {starts.dtype}, must be torch.int32: call {name}.int()")
    if starts.dim() != 1 or starts.shape[0] < 2:
        raise ValueError(
            f"{name} has shape {tuple(starts.shape)}, must have (N + 1,) for N sequences, 1 or more: where each "
            "begins, and where the last one ends"
        )
    require_device(name, starts, "q", q)


def require_softcap(softcap: float | None) -> None:
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, must be greater than 0: pass None for none")


def require_sequences(q: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    """TypeError or ValueError if these are not None both, and cannot be the first tokens of as many sequences."""
    from kernel_twins.ops import tensors

    if cu_seqlens_q is None and cu_seqlens_k is None:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise TypeError(f"{name} is None, must be a tensor where the other one is: pass both or none")
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        require_starts(name, starts, q)
        tensors.require_contiguous(name, starts)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_q has {len(cu_seqlens_q)} numbers and cu_seqlens_k {len(cu_seqlens_k)}, "
            "must both have one more than there are sequences"
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"q has a batch of {q.shape[0]}, must be 1 with cu_seqlens_q: pack the tokens of all sequences"
        )


def _pairs(band: Band, queries: int, keys: int) -> int:
    return sum(max(0, min(keys - 1, i + band[1]) - max(0, i + band[0]) + 1) for i in range(queries))


def seen(case: Case) -> int:
    """Pairs of a query and a key that it sees, of one head and all sequences."""
    batch, _, queries, _ = case.shape
    # FLOPs of a square causal product are told as half of the whole one's, as everybody does.
    if case.get("mask") and keys_of(case) == queries and not case.get("window") and not case.get("packed"):
        return batch * (queries * queries // 2)
    counts: dict[tuple[int, int], int] = {each: _pairs(band_in(case, *each), *each) for each in set(lengths_of(case))}
    return sum(counts[each] for each in lengths_of(case))


def flops(case: Case) -> int:
    """Two products of 2 D operations for each pair."""
    _, h, _, d = case.shape
    return 4 * h * seen(case) * d


def minimum_bytes(case: Case) -> int:
    _, h, _, d = case.shape
    queries, keys = sum(each for each, _ in lengths_of(case)), sum(each for _, each in lengths_of(case))
    elements = 2 * h * queries * d + 2 * kv_heads_of(case) * keys * d
    return elements * ITEMSIZE[case.dtype] + h * queries * 4

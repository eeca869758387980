"""Attention as the formula says it, in float64, and operands, for the tests of the public functions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from kernel_twins.functional.attention.shared import Options, options_of

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (2, 1)},
    "left": {"window": (3, None), "causal": "bottom-right"},
    "left alone": {"window": (3, None)},
    "right alone": {"window": (None, 150)},
    "window top-left": {"window": (3, -1), "causal": "top-left"},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.7, "causal": True},
    "all": {"causal": True, "window": (3, 0), "softcap": 2.0, "scale": 0.9},
}
"""Arguments of kernel_twins.attention."""

SUBSETS = tuple(itertools.product((False, True), repeat=3))
"""Which of the gradients of q, k and v are wanted; none first."""


def sees(queries: int, keys: int, causal: Any, window: Any) -> Tensor:
    left, right = (None if each in (None, -1) else each for each in window or (None, None))
    if causal:
        right = 0
    ahead = 0 if causal == "top-left" else keys - queries
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - ahead
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Any = None, window: Any = None, softcap: Any = None, scale: Any = None
) -> tuple[Tensor, Tensor]:
    """The result and lse of [B, H, S, D]; their gradients are 0 where a query sees no key."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(group, 1) for each in (k, v))
    scores = q.double() @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = sees(q.shape[2], k.shape[2], causal, window).to(q.device)
    none = ~seen.any(1)
    known = scores.masked_fill(~seen, -math.inf).masked_fill(none[:, None], 0.0)
    lse = known.logsumexp(3) if known.shape[3] else known.sum(3)
    p = torch.exp(known - lse[..., None]).masked_fill(none[:, None], 0.0)
    return p @ v, lse.masked_fill(none, -math.inf)


def attend_to_sequences(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, **kind: Any
) -> tuple[Tensor, Tensor]:
    """The same of [tokens, H, D]; 0 and -inf where a token is in no sequence."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64, device=q.device)
    places = zip(starts.tolist(), starts[1:].tolist(), key_starts.tolist(), key_starts[1:].tolist(), strict=False)
    for begin, end, key_begin, key_end in places:
        one = (q[begin:end], k[key_begin:key_end], v[key_begin:key_end])
        found, sums = attend(*(each.transpose(0, 1)[None] for each in one), **kind)
        rows = torch.arange(begin, end, device=q.device)
        out = out.index_copy(0, rows, found[0].transpose(0, 1))
        lse = lse.index_copy(1, rows, sums[0])
    return out, lse


# ----------------------------------------------------------------------------------------------------------------------
# Operands
# ----------------------------------------------------------------------------------------------------------------------

STARTS, KEY_STARTS = [1, 4, 4, 9, 13], [2, 6, 8, 8, 14]  # sequences without queries, without keys, unused tokens
TOKENS, KEY_TOKENS = 15, 17


def operands(queries=5, keys=7, *, heads=4, kv_heads=2, d=8, dtype=torch.float64, requires_grad=False) -> Any:
    source = torch.Generator().manual_seed(0)
    shapes = (2, heads, queries, d), (2, kv_heads, keys, d), (2, kv_heads, keys, d)
    made = (torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes)
    return tuple(each.requires_grad_(requires_grad) for each in made)


def tokens(dtype=torch.float64, requires_grad=False) -> Any:
    """q, k and v of sequences, with NaN where keys are in none."""
    source = torch.Generator().manual_seed(0)
    shapes = (TOKENS, 4, 8), (KEY_TOKENS, 2, 8), (KEY_TOKENS, 2, 8)
    q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes)
    k[: KEY_STARTS[0]] = v[KEY_STARTS[-1] :] = math.nan
    return tuple(each.requires_grad_(requires_grad) for each in (q, k, v))


def starts() -> Any:
    return tuple(torch.tensor(each, dtype=torch.int32) for each in (STARTS, KEY_STARTS))


def asked(**kind: Any) -> Options:
    causal, window, softcap, scale = (kind.get(name) for name in ("causal", "window", "softcap", "scale"))
    return options_of(causal, window, softcap, scale, None)


def gradients(results: Any, leaves: Any, seed: int = 1) -> Any:
    """Of random gradients of the results; those of lse are 0 where it is -inf."""
    source = torch.Generator().manual_seed(seed)
    douts = [torch.randn(each.shape, generator=source, dtype=torch.float64) for each in results]
    douts = [dout.masked_fill(each.isinf(), 0).to(each.dtype) for dout, each in zip(douts, results, strict=True)]
    return torch.autograd.grad(results, leaves, douts)

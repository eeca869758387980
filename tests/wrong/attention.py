"""Attention, computed wrongly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_twins.spec import Case
from tests.wrong.faults import RESULTS, Change, Fault, Formula, Outputs, exponential, without

TILE = 64  # keys


def _rolled(by: int, dim: int) -> Change:
    return lambda values: values.roll(by, dim)


def _tiles(values: Tensor) -> Tensor:
    """[..., Sk] in tiles of keys, [..., tiles, TILE]; what the last one lacks is -inf."""
    lacking = -values.shape[-1] % TILE if values.shape[-1] else TILE
    padded = torch.nn.functional.pad(values, (0, lacking), value=-math.inf)
    return padded.unflatten(-1, (-1, TILE))


def attention(
    fault: Fault,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float,
    band: tuple[int, int],
    softcap: float | None = None,
    from_end: bool = False,
) -> Outputs:
    """A sequence after the other, or a batch of sequences of one length at once."""

    def attend(q: Tensor, k: Tensor, v: Tensor, length: int) -> Outputs:
        own = length - q.shape[2]  # key of query 0, if the last query's own is the last key
        relative = torch.tensor(band) if from_end else torch.tensor(band) - own
        visible = _visible(fault, q.shape[2], k.shape[2], own, relative).to(q.device)
        return _in_tiles(fault, q, k, v, visible, scale, softcap)

    if cu_seqlens_q is None or cu_seqlens_k is None:
        return attend(q, k, v, k.shape[2])
    lengths_q, lengths_k = (starts.diff().tolist() for starts in (cu_seqlens_q, cu_seqlens_k))
    firsts = fault.at("starts", cu_seqlens_k[:-1]).tolist()
    ends = fault.at("ends", cu_seqlens_k.diff()).tolist()
    results = []
    for rows, first, end, length in zip(q.split(lengths_q, 2), firsts, ends, lengths_k, strict=True):
        keys = slice(first, first + end)
        results.append(attend(rows, k[:, :, keys], v[:, :, keys], length))
    return tuple(torch.cat(each, 2) for each in zip(*results, strict=True))


def _visible(fault: Fault, queries: int, keys: int, own: int, band: Tensor, of: str = "") -> Tensor:
    """[Sq, Sk], true where a query sees a key. The band is relative to the query's own key; ``of`` ends its places."""
    first, last = fault.at(f"band{of}", band)
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - fault.at("own", torch.tensor(own))
    return fault.at(f"mask{of}", (distance >= first) & (distance <= last))


def _in_tiles(
    fault: Fault, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None
) -> Outputs:
    """Tile by tile: each tile's exponentials have the maximum so far, and are rescaled to that of the row."""
    heads = fault.at("heads", torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1]))
    factor = fault.at("scale", torch.tensor(scale, dtype=torch.float64, device=q.device))
    scores = fault.at("q", q) @ k[:, heads].transpose(2, 3) * factor
    scores.masked_fill_(~visible, -math.inf)
    if softcap is not None:
        cap = fault.at("softcap", torch.tensor(softcap, dtype=torch.float64, device=q.device))
        scores = cap * (scores / cap).tanh_()  # of a hidden key -cap
        scores.masked_fill_(~fault.at("mask behind the softcap", visible), -math.inf)
    tiles = _tiles(scores)
    running = tiles.amax(-1, keepdim=True).cummax(-2).values
    running = running.masked_fill(fault.at("no key so far", running == -math.inf), 0.0)
    if softcap is None:  # capped scores are small: their exponentials need no maximum
        running = fault.at("maximum", running)
    largest = running[..., -1:, :]
    p = exponential(tiles - running) * fault.at("factors", (running - largest).exp())
    p = p.flatten(-2)[..., : k.shape[2]]
    total = fault.at("sum", p).sum(-1, keepdim=True)
    out = fault.at("p", p) @ fault.at("v", v[:, heads])
    lse = fault.at("lse", largest[..., 0, :] + total.log())
    return (out / total).masked_fill(total == 0, 0.0), lse[..., 0]


def attention_backward(
    fault: Fault,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float,
    band: tuple[int, int],
    softcap: float | None = None,
    from_end: bool = False,
) -> Outputs:
    """A sequence, or a batch, after the other: pairs of all heads are in memory."""
    of_queries = dout, q, result, lse, torch.zeros_like(lse) if dlse is None else dlse
    results = tuple(map(torch.zeros_like, (q, k, v)))

    def add(batch: int, rows: slice, keys: slice, own: int) -> None:
        one = slice(batch, batch + 1)
        given = (*(each[one, :, rows] for each in of_queries), k[one, :, keys], v[one, :, keys])
        limits = torch.tensor(band) if from_end else torch.tensor(band) - own
        found = _gradients(fault, *given, scale=scale, band=limits, own=own, softcap=softcap)
        for each, gradient, tokens in zip(results, found, (rows, keys, keys), strict=True):
            each[one, :, tokens] += gradient

    if cu_seqlens_q is None or cu_seqlens_k is None:
        for batch in range(len(q)):
            add(batch, slice(None), slice(None), k.shape[2] - q.shape[2])
        return results
    starts = torch.stack((cu_seqlens_q, cu_seqlens_k))
    firsts = fault.at("starts", starts[:, :-1]).t().tolist()
    sizes = fault.at("sizes", starts.diff()).t().tolist()
    for (row, key), (rows, keys), (queries, length) in zip(firsts, sizes, starts.diff().t().tolist(), strict=True):
        add(0, slice(row, row + rows), slice(key, key + keys), length - queries)
    for each, end in zip(results, (cu_seqlens_q[-1], cu_seqlens_k[-1], cu_seqlens_k[-1]), strict=True):
        each[:, :, end:] = fault.at("gradients behind the sequences", torch.zeros_like(each[:, :, end:]))
    return results


def _gradients(
    fault: Fault,
    dout: Tensor,
    q: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    band: Tensor,
    own: int,
    softcap: float | None,
) -> Outputs:
    """dq by a loop over keys, dk and dv by a loop over queries: each has its own mask."""
    device, kv_heads = q.device, k.shape[1]
    heads = torch.arange(q.shape[1], device=device) // (q.shape[1] // kv_heads)
    by_queries, by_keys = (
        _visible(fault, q.shape[2], k.shape[2], own, band, of).to(device) for of in (" of dq", " of dk and dv")
    )
    factor = torch.tensor(scale, dtype=torch.float64, device=device)
    read = fault.at("heads", heads)
    scores = fault.at("q", q) @ k[:, read].transpose(2, 3) * fault.at("scale", factor)
    slope = torch.ones_like(scores)
    if softcap is not None:
        cap = fault.at("softcap", torch.tensor(softcap, dtype=torch.float64, device=device))
        tanh = (scores / cap).tanh()
        scores, slope = cap * tanh, fault.at("slope", 1 - fault.at("tanh of the slope", tanh).square())
    sums = fault.at("lse", lse)
    sums = sums.masked_fill(fault.at("no key", sums == -math.inf), 0.0)[..., None]
    delta = fault.at("products", dout * result).sum(-1) - fault.at("dlse", dlse)
    rises = fault.at("dout", dout) @ fault.at("v", v[:, read]).transpose(2, 3) - fault.at("delta", delta)[..., None]

    def p(visible: Tensor) -> Tensor:
        return exponential(scores.masked_fill(~visible, -math.inf) - sums)

    def summed(of_heads: Tensor) -> Tensor:
        """Over the query heads that share a head of keys."""
        terms = fault.at("group", of_heads.unflatten(1, (kv_heads, -1))).flatten(1, 2)
        return torch.zeros_like(k).index_add(1, fault.at("heads of sums", heads), terms)

    ds = fault.at("ds", p(by_queries) * rises * slope)
    dq = fault.at("ds of dq", ds) @ fault.at("k of dq", k[:, read]) * fault.at("scale of dq", factor)
    ds = fault.at("ds", p(fault.at("mask of ds", by_keys)) * rises * slope)
    dk = fault.at("ds of dk", ds.transpose(2, 3)) @ fault.at("q of dk", q) * fault.at("scale of dk", factor)
    weights = fault.at("p of dv", p(by_keys).transpose(2, 3))
    one_or_scale = torch.stack((torch.ones_like(factor), factor))
    dv = weights @ fault.at("dout of dv", dout) * fault.at("factor of dv", one_or_scale)[0]
    return dq, fault.at("dk", summed(dk)), fault.at("dv", summed(dv))


def _remainders(heads: Tensor) -> Tensor:
    """Heads of keys by the remainder of a query head, not by its quotient."""
    return torch.arange(len(heads), device=heads.device) % (heads.max() + 1)


def _twice(first: int) -> Change:
    """The terms from ``first`` on count twice."""

    def change(terms: Tensor) -> Tensor:
        changed = terms.clone()
        changed[..., first:] *= 2
        return changed

    return change


def _without_heads(first: int, last: int | None) -> Change:
    """[B, H_KV, group, Sk, D] without some query heads of each group."""

    def change(terms: Tensor) -> Tensor:
        kept = terms.clone()
        kept[:, :, first:last] = 0
        return kept

    return change


def _without_rows(first: int) -> Change:
    return lambda values: without(first, None)(values.mT).mT


def _in_8_bits(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).double()


BANDS: dict[str, Change] = {
    "from a key before": lambda band: band - torch.tensor((1, 0)),
    "from a key behind": lambda band: band + torch.tensor((1, 0)),
    "to a key before": lambda band: band - torch.tensor((0, 1)),
    "to a key behind": lambda band: band + torch.tensor((0, 1)),
}
SCALES: dict[str, Change] = {
    "without its sign": torch.abs,
    "in base 2 without log2 e": lambda scale: scale * math.log(2),
}
ROWS: dict[str, Change] = {"of the row before": _rolled(1, 2), "of the head before": _rolled(1, 1)}
TERMS: dict[str, Change] = {
    "without its last term": without(-1, None),
    "without its last tile": without(-TILE, None),
    "with its last tile twice": _twice(-TILE),
    "of the tile before": _rolled(TILE, -1),
}
MASKS: dict[str, Change] = {
    "of the query before": _rolled(1, 0),
    "of the query behind": _rolled(-1, 0),
    "without the last key": without(-1, None),
}
STALE: dict[str, Change] = {
    **RESULTS,
    "stale in their last row": _without_rows(-1),
    "stale in their last tile": _without_rows(-TILE),
}

FORMULAS = {
    "attention": Formula(
        attention,
        {
            "q": {"of the tile before": _rolled(TILE, 2), "of the head before": _rolled(1, 1)},
            "v": {"of the tile before": _rolled(TILE, 2), "of the key before": _rolled(1, 2)},
            "heads": {"of the next group": _rolled(1, 0), "by the remainder": _remainders},
            "scale": SCALES,
            "softcap": {"missing": lambda cap: cap * 2.0**32},
            "mask behind the softcap": {"missing": torch.ones_like},
            "band": BANDS,
            "own": {"aligned with the first key": torch.zeros_like},
            "starts": {"of the first sequence": lambda starts: starts[:1].expand_as(starts)},
            "ends": {"behind a key of the next sequence": lambda lengths: lengths + 1},
            "mask": MASKS,
            "no key so far": {"missing": torch.zeros_like},
            "maximum": {"missing": torch.zeros_like},
            "factors": {"missing": torch.ones_like, "of the query before": _rolled(1, 2)},
            "sum": {"without its last tile": without(-TILE, None), "with its last key twice": _twice(-1)},
            "p": {
                "without its last tile": without(-TILE, None),
                "of the tile before": _rolled(TILE, -1),
                "in 8 bits": _in_8_bits,
            },
            "lse": {"in base 2": lambda lse: lse / math.log(2), "of the exponentials alone": lambda lse: lse - 1},
        },
        knows=lambda case: case.shape[2] <= 2_048,  # all scores of all heads are in memory, in float64
        cases=(
            Case.of(1, 6, 150, 64, dtype="bf16", kv="2"),
            Case.of(1, 2, 200, 64, dtype="bf16", window="40_9", keys="230"),
            Case.of(1, 2, 259, 64, dtype="bf16", mask="causal", keys="130"),
            Case.of(1, 2, 150, 64, dtype="bf16", scale="neg"),
            Case.of(1, 2, 200, 64, dtype="bf16", cap="2", mask="causal"),
            Case.of(7, 2, 140, 64, dtype="bf16", packed="yes"),
            Case.of(6, 4, 150, 64, dtype="bf16", packed="yes", mask="causal", keys="170", kv="2"),
        ),
    ),
    "attention_backward": Formula(
        attention_backward,
        {
            "q": ROWS,
            "v": {"of the tile before": _rolled(TILE, 2), "of the key before": _rolled(1, 2)},
            "heads": {"of the next group": _rolled(1, 0), "by the remainder": _remainders},
            "scale": SCALES,
            "softcap": {"missing": lambda cap: cap * 2.0**32},
            "slope": {"missing": torch.ones_like},
            "tanh of the slope": {"the score without a softcap": torch.atanh, "not squared": lambda t: t.abs().sqrt()},
            "starts": {"of keys for queries": lambda starts: starts[1:].expand_as(starts)},
            "sizes": {
                "with a query behind": lambda sizes: sizes + torch.tensor([[1], [0]], device=sizes.device),
                "with a key behind": lambda sizes: sizes + torch.tensor([[0], [1]], device=sizes.device),
            },
            "gradients behind the sequences": {"not written": lambda zeros: torch.full_like(zeros, math.nan)},
            "band of dq": BANDS,
            "band of dk and dv": BANDS,
            "own": {"aligned with the first key": torch.zeros_like},
            "mask of dq": MASKS,
            "mask of dk and dv": MASKS,
            "mask of ds": {"missing": torch.ones_like},
            "no key": {"not asked for": torch.zeros_like},
            "lse": {**ROWS, "in base 2": lambda lse: lse / math.log(2)},
            "products": {"missing": torch.zeros_like, "without their last pack": without(-8, None)},
            "dlse": {"missing": torch.zeros_like, "with the other sign": torch.neg},
            "delta": {"missing": torch.zeros_like, **ROWS},
            "dout": ROWS,
            "ds": {"in 8 bits": _in_8_bits},
            "ds of dq": TERMS,
            "k of dq": {"of the key before": _rolled(1, 2)},
            "scale of dq": {"missing": torch.ones_like},
            "ds of dk": TERMS,
            "q of dk": ROWS,
            "scale of dk": {"missing": torch.ones_like},
            "p of dv": {**TERMS, "in 8 bits": _in_8_bits},
            "dout of dv": ROWS,
            "factor of dv": {"the scale": _rolled(1, 0)},
            "group": {
                "of its first query head": _without_heads(1, None),
                "without its last one": _without_heads(-1, None),
            },
            "heads of sums": {"by the remainder": _remainders},
            "dk": STALE,
            "dv": STALE,
        },
        knows=lambda case: case.shape[2] <= 2_048,  # all pairs of all heads are in memory, in float64
        cases=(
            Case.of(1, 6, 150, 64, dtype="bf16", kv="2", dlse="yes"),
            Case.of(1, 2, 200, 64, dtype="bf16", window="40_9", keys="230"),
            Case.of(1, 2, 259, 64, dtype="bf16", mask="causal", keys="130"),
            Case.of(2, 2, 130, 40, dtype="bf16", mask="top", keys="200"),
            Case.of(1, 2, 150, 64, dtype="bf16", scale="neg"),
            Case.of(1, 2, 140, 64, dtype="bf16", dout="expanded"),
            Case.of(1, 2, 130, 64, dtype="bf16", cap="2", mask="causal"),
            Case.of(7, 2, 140, 64, dtype="bf16", packed="yes"),
            Case.of(6, 4, 150, 64, dtype="bf16", packed="yes", mask="causal", keys="170", kv="2", cap="3"),
        ),
    ),
}

"""Attention, computed wrongly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_twins.spec import Case
from tests.wrong.faults import Change, Fault, Formula, Outputs, exponential, without

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


def _visible(fault: Fault, queries: int, keys: int, own: int, band: Tensor) -> Tensor:
    """[Sq, Sk], true where a query sees a key. The band is relative to the query's own key."""
    first, last = fault.at("band", band)
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - fault.at("own", torch.tensor(own))
    return fault.at("mask", (distance >= first) & (distance <= last))


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


def _remainders(heads: Tensor) -> Tensor:
    """Heads of keys by the remainder of a query head, not by its quotient."""
    return torch.arange(len(heads), device=heads.device) % (heads.max() + 1)


def _twice_last(p: Tensor) -> Tensor:
    changed = p.clone()
    changed[..., -1:] *= 2
    return changed


FORMULAS = {
    "attention": Formula(
        attention,
        {
            "q": {"of the tile before": _rolled(TILE, 2), "of the head before": _rolled(1, 1)},
            "v": {"of the tile before": _rolled(TILE, 2), "of the key before": _rolled(1, 2)},
            "heads": {"of the next group": _rolled(1, 0), "by the remainder": _remainders},
            "scale": {"without its sign": torch.abs, "in base 2 without log2 e": lambda scale: scale * math.log(2)},
            "softcap": {"missing": lambda cap: cap * 2.0**32},
            "mask behind the softcap": {"missing": torch.ones_like},
            "band": {
                "from a key before": lambda band: band - torch.tensor((1, 0)),
                "from a key behind": lambda band: band + torch.tensor((1, 0)),
                "to a key before": lambda band: band - torch.tensor((0, 1)),
                "to a key behind": lambda band: band + torch.tensor((0, 1)),
            },
            "own": {"aligned with the first key": torch.zeros_like},
            "starts": {"of the first sequence": lambda starts: starts[:1].expand_as(starts)},
            "ends": {"behind a key of the next sequence": lambda lengths: lengths + 1},
            "mask": {
                "of the query before": _rolled(1, 0),
                "of the query behind": _rolled(-1, 0),
                "without the last key": without(-1, None),
            },
            "no key so far": {"missing": torch.zeros_like},
            "maximum": {"missing": torch.zeros_like},
            "factors": {"missing": torch.ones_like, "of the query before": _rolled(1, 2)},
            "sum": {"without its last tile": without(-TILE, None), "with its last key twice": _twice_last},
            "p": {
                "without its last tile": without(-TILE, None),
                "of the tile before": _rolled(TILE, -1),
                "in 8 bits": lambda p: p.to(torch.float8_e4m3fn).double(),
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
}

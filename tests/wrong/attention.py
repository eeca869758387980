"""Attention, computed wrongly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.wrong.faults import Change, Fault, Formula, Outputs, exponential, without

TILE = 64  # keys


def _rolled(by: int, dim: int) -> Change:
    return lambda values: values.roll(by, dim)


def _tiles(values: Tensor) -> Tensor:
    """[..., Sk] in tiles of keys, [..., tiles, TILE]; what the last one lacks is -inf."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % TILE), value=-math.inf)
    return padded.unflatten(-1, (-1, TILE))


def attention(fault: Fault, q: Tensor, k: Tensor, v: Tensor, *, scale: float, band: tuple[int, int]) -> Outputs:
    """Tile by tile: each tile's exponentials have the maximum so far, and are rescaled to that of the row."""
    queries, keys = q.shape[2], k.shape[2]
    heads = fault.at("heads", torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1]))
    distance = torch.arange(keys, device=q.device) - torch.arange(queries, device=q.device)[:, None]
    visible = fault.at("mask", (distance >= band[0]) & (distance <= band[1]))
    scores = fault.at("q", q) @ k[:, heads].transpose(2, 3) * scale
    tiles = _tiles(scores.masked_fill_(~visible, -math.inf))
    running = tiles.amax(-1, keepdim=True).cummax(-2).values
    running = fault.at("maximum", running.masked_fill(running == -math.inf, 0.0))
    largest = running[..., -1:, :]
    p = exponential(tiles - running) * fault.at("factors", (running - largest).exp())
    p = p.flatten(-2)[..., :keys]
    total = fault.at("sum", p).sum(-1, keepdim=True)
    out = fault.at("p", p) @ fault.at("v", v[:, heads])
    lse = fault.at("lse", largest[..., 0, :] + total.log())
    return (out / total).masked_fill(total == 0, 0.0), lse[..., 0]


def _twice_last(p: Tensor) -> Tensor:
    changed = p.clone()
    changed[..., -1:] *= 2
    return changed


FORMULAS = {
    "attention": Formula(
        attention,
        {
            "q": {"of the tile before": _rolled(TILE, 2)},
            "v": {"of the tile before": _rolled(TILE, 2), "of the key before": _rolled(1, 2)},
            "heads": {"of the next group": _rolled(1, 0)},
            "mask": {
                "of the query before": _rolled(1, 0),
                "of the query behind": _rolled(-1, 0),
                "without the last key": without(-1, None),
            },
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
    ),
}

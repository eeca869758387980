"""Faults of kernels: changes to the terms of a sum, to results, or to operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_twins.spec import Case

Change = Callable[[Tensor], Tensor]
PACK, WARP = 8, 256  # elements of 16 bits: a lane's load, a warp's


def same(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Fault:
    """One fault: ``change`` is applied to the values at ``place``; ``name`` says what is wrong with them."""

    place: str
    name: str
    change: Change

    def at(self, place: str, values: Tensor) -> Tensor:
        return self.change(values) if place == self.place else values


RIGHT = Fault("nowhere", "right", same)

# ----------------------------------------------------------------------------------------------------------------------
# Faults of a sum over the last dimension: its terms are changed
# ----------------------------------------------------------------------------------------------------------------------


def without(first: int | None, last: int | None) -> Change:
    """The terms ``first`` to ``last``, as in a slice, are lost."""

    def change(terms: Tensor) -> Tensor:
        kept = terms.clone()
        kept[..., first:last] = 0
        return kept

    return change


def without_last_rank(terms: Tensor) -> Tensor:
    """The part of the last block of a cluster of eight is lost."""
    return without(terms.shape[-1] - terms.shape[-1] // 8, None)(terms)


def twice_the_last_pack(terms: Tensor) -> Tensor:
    """The last pack counts twice, as if a tail overlapped a whole pack."""
    changed = terms.clone()
    changed[..., -PACK:] *= 2
    return changed


def in_half(dtype: torch.dtype) -> Change:
    """Terms and partial sums are rounded, as in a tree in half precision."""

    def change(terms: Tensor) -> Tensor:
        level = terms.to(dtype)
        while level.shape[-1] > 1:
            if level.shape[-1] % 2:
                level = torch.cat([level, torch.zeros_like(level[..., :1])], -1)
            level = level[..., ::2] + level[..., 1::2]
        whole = torch.zeros_like(terms)
        whole[..., :1] = level.double()
        return whole

    return change


SUMS: dict[str, Change] = {
    "without its last pack": without(-PACK, None),
    "without its last warp": without(-WARP, None),
    "without the last rank": without_last_rank,
    "without its first tile": without(0, 1024),
    "without its last element": without(-1, None),
    "with its last pack twice": twice_the_last_pack,
    "in half precision": in_half(torch.float16),
    "of the row before": lambda terms: terms.roll(1, 0),
    "missing": torch.zeros_like,
}

# ----------------------------------------------------------------------------------------------------------------------
# Faults of results
# ----------------------------------------------------------------------------------------------------------------------


def size_of(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0).square().mean(-1, keepdim=True).sqrt()


RESULTS: dict[str, Change] = {  # stale results are zeros, as an earlier call may have left them
    "stale in their last pack": without(-PACK, None),
    "stale in their last element": without(-1, None),
    "with halves swapped": lambda values: values.roll(values.shape[-1] // 2, -1),
    "with a small bias": lambda values: values + 0.01 * size_of(values),
    "with small ones flushed": lambda values: values.masked_fill(values.abs() < 0.02 * size_of(values), 0.0),
    "a 64th too large": lambda values: values * (1 + 2.0**-6),
    "negative zeroed": lambda values: values.clamp_min(0.0),
    "of the element before": lambda values: values.roll(1, -1),
}

# ----------------------------------------------------------------------------------------------------------------------
# Faults of operands
# ----------------------------------------------------------------------------------------------------------------------

OTHERS: dict[str, Change] = {
    "missing": torch.zeros_like,
    "of the column before": lambda values: values.roll(1, -1),
    "a 64th too large": RESULTS["a 64th too large"],
    "without its last pack": without(-PACK, None),
}

# ----------------------------------------------------------------------------------------------------------------------
# Operations, with their places
# ----------------------------------------------------------------------------------------------------------------------

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Formula:
    """An operation in float64: ``compute`` takes a fault, the inputs and the options.

    ``places`` lists the faults of each place. ``knows`` says which timed cases the formula covers; ``cases`` are small
    ones with the options that no timed case has. With ``rounds``, compute also gets the inputs' dtype. Without
    ``results``, no faults of results are tried, since there is one number.
    """

    compute: Callable[..., Outputs]
    places: dict[str, dict[str, Change]]
    knows: Callable[[Case], bool] = lambda case: True
    cases: tuple[Case, ...] = ()
    rounds: bool = False
    results: bool = True


def exponential(x: Tensor) -> Tensor:
    """exp in fp32, which overflows for values that float64 can hold."""
    return x.float().exp().double()

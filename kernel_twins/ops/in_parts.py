"""References computed part by part, so that the float64 tensors of a huge matrix fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Part = Callable[[slice], tuple[Tensor, Tensor]]  # values and terms of some rows

_CHUNK = 2**26  # elements held in float64 at a time, in each of a few tensors


def _parts(start: int, stop: int, n: int) -> Iterator[slice]:
    """A range of rows of n elements, in pieces; one empty piece if it has no rows."""
    step = max(1, _CHUNK // max(1, n))
    for first in range(start, max(stop, start + 1), step):
        yield slice(first, min(first + step, stop))


def over_rows(part: slice, n: int, of: Part) -> tuple[Tensor, Tensor]:
    """Values and terms that ``of`` computes for rows of n elements."""
    import torch

    values, terms = zip(*map(of, _parts(part.start, part.stop, n)), strict=True)
    return torch.cat(values), torch.cat(terms)


def over_columns(matrix: Tensor, columns: slice, of: Part) -> tuple[Tensor, Tensor]:
    """Column sums of the values and terms, [rows, columns], that ``of`` computes for some rows of a matrix."""
    import torch

    n = matrix[:1, columns].shape[1]
    total = torch.zeros(2, n, dtype=torch.float64, device=matrix.device)
    for some in _parts(0, matrix.shape[0], n):
        values, terms = of(some)
        total += torch.stack([values.sum(dim=0), terms.sum(dim=0)])
    return total[0], total[1]

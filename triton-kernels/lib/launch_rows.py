"""Launches over more rows than one grid takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

MOST_ROWS = 2**30  # a launch: grids have fewer than 2^31 programs, and kernels count rows in 32 bits


def in_parts(launch: Callable[..., None], *inputs: Tensor, out: Tensor, **options: Any) -> bool:
    """Call a launcher for MOST_ROWS rows at a time and return True; return False, without a call, for fewer rows."""
    rows = out.shape[0]
    if rows <= MOST_ROWS:
        return False
    for first in range(0, rows, MOST_ROWS):
        part = slice(first, first + MOST_ROWS)
        launch(*(each[part] for each in inputs), out=out[part], **options)
    return True

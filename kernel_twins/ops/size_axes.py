"""What throughput is drawn against, of operations whose figures look alike."""

from __future__ import annotations

import math

from kernel_twins.spec import SizeAxis

ELEMENTS = SizeAxis("elements", lambda case: case.shape[0])
ROW_LENGTH = SizeAxis(
    "N, row length",
    lambda case: case.shape[1],
    lambda case: f"M N = 2^{math.log2(math.prod(case.shape)):.0f}",  # rounded: M is a whole number
)
SQUARES = SizeAxis("M = N = K", lambda case: case.shape[0], lambda case: "" if len(set(case.shape)) == 1 else None)

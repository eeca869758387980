"""Sampled cases: random sizes; layouts, options and dtypes in turn.

An operation's ``draw`` makes a case from ``Draws``. ``case`` repeats that until the case is neither too small nor too
large in time and memory. Everything is a function of the seed. Neither torch nor a GPU is needed.
"""

from __future__ import annotations

from functools import cache

from kernel_twins.harness import ceilings
from kernel_twins.spec import Case, Drawn, Op
from kernel_twins.spec.chance import Draws

LEAST_US = 10.0
MOST_BYTES = 2**32  # of all operands
MOST_FLOPS = 2 * 10**12

_ONE_SM = 4.0
"""One SM alone reaches about this many times its share of the memory's rate, and hardly more."""


def case(op: Op, draws: Draws) -> Case:
    """The next case that the operation accepts and that is neither too small nor too large."""
    if op.draw is None:
        raise ValueError(f"op is {op.name!r}, must be one that a public function is called with: it draws no cases")
    draws.next()
    while True:
        drawn = op.draw(draws)
        if not op.accepts(drawn.case) and _suits(op, drawn):
            return drawn.case


def least_us(op: Op, drawn: Drawn) -> float:
    """The time of a call on the reference GPU at its measured ceilings; PyTorch is not faster."""
    limits = _limits()
    share = 1.0 if drawn.blocks is None else min(1.0, _ONE_SM * drawn.blocks / limits.multiprocessors)
    memory_us = op.bytes(drawn.case) / (limits.dram_copy * share) / 1e3
    peak = limits.bf16 if op.ceiling == "bf16" else limits.fp32
    return max(memory_us, op.flops(drawn.case) / peak / 1e6)


def _suits(op: Op, drawn: Drawn) -> bool:
    if op.bytes(drawn.case) > MOST_BYTES or op.flops(drawn.case) > MOST_FLOPS:
        return False
    return least_us(op, drawn) >= LEAST_US


@cache
def _limits() -> ceilings.Ceilings:
    return ceilings.load(ceilings.REFERENCE_GPU)

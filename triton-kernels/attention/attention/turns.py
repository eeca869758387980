"""Turns of two consumers, by named barriers, for the attention steps in Gluon.

Gluon has no named barriers. These are PTX, executed once by each thread of a warpgroup: the instruction stands in an
elementwise operation on as many numbers. Triton itself takes barriers from 0 on, one for each partition, and a few.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPGROUP = gl.constexpr(128)
FIRST_TURN = gl.constexpr(8)  # of the 16 named barriers, behind all that Triton takes


@gluon.jit
def take(CONSUMER: gl.constexpr):
    """Waits for this consumer's turn: for its own threads, and the arrival of those that had the turn before."""
    _each_thread("bar.sync", FIRST_TURN + CONSUMER)


@gluon.jit
def give_to(CONSUMER: gl.constexpr):
    """Passes the turn on to that consumer, and goes on."""
    _each_thread("bar.arrive", FIRST_TURN + CONSUMER)


@gluon.jit
def _each_thread(INSTRUCTION: gl.constexpr, BARRIER: gl.constexpr):
    threads = gl.arange(0, WARPGROUP, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        f"{INSTRUCTION} {BARRIER}, {2 * WARPGROUP}; mov.b32 $0, $1;", "=r,r", [threads], gl.int32, False, 1
    )

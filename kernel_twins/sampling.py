"""Cases that nobody chose: sizes by chance, and layouts, options and dtypes in turn.

An operation's ``draw`` makes a case of what ``Draws`` gives it; ``case`` repeats that until PyTorch has something to
do, and memory and patience suffice for it. Everything is a function of the seed. Neither torch nor a GPU is needed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kernel_twins import ceilings

if TYPE_CHECKING:
    from kernel_twins.spec import Case, Op

_T = TypeVar("_T")

LEAST_US = 10.0
MOST_BYTES = 2**32  # of all operands
MOST_FLOPS = 2 * 10**12
MULTIPLES = (64, 64, 8, 1)
"""What sizes are multiples of, in turn; of 1 are those that 8 does not divide."""

_ONE_SM = 4.0
"""A multiprocessor alone reaches more than its share of the memory's rate, and hardly more than this many shares."""


class Drawn(NamedTuple):
    """A case, and how many blocks PyTorch gives it where that is known to be few."""

    case: Case
    blocks: int | None = None


class Draws:
    """A source of cases. What is ``fixed`` by name is not dealt: the options that a public function has no choice of.

    Options are dealt as cards are: each once, in random order, then all anew. An option is dealt once a case, however
    often the case's sizes are drawn.
    """

    def __init__(self, seed: int | str, fixed: Mapping[str, object] | None = None) -> None:
        self._random = random.Random(seed)
        self._fixed = fixed or {}
        self._decks: dict[str, list[int]] = {}
        self._dealt: dict[str, object] = {}

    def next(self) -> None:
        """Go on to the next case."""
        self._dealt = {}

    def deal(self, name: str, options: Sequence[_T]) -> _T:
        """One of the options, in turn."""
        if name in self._fixed:
            return self._fixed[name]  # type: ignore[return-value]  # one of the options
        if name not in self._dealt:
            deck = self._decks.setdefault(name, [])
            if not deck:
                deck += range(len(options))
                self._random.shuffle(deck)
            self._dealt[name] = options[deck.pop()]
        return self._dealt[name]  # type: ignore[return-value]  # a name has the same options every time

    def number(self, low: int, high: int) -> int:
        """Log-uniform."""
        return min(high, max(low, round(math.exp(self._random.uniform(math.log(low), math.log(high))))))

    def size(self, low: int, high: int) -> int:
        """Log-uniform, and of the multiples that the case has: of 64, of 8, or one that 8 does not divide."""
        multiple = self.deal("multiple", MULTIPLES)
        while True:
            size = self.number(low, high)
            if multiple == 1 and size % 8:
                return size
            size = round(size / multiple) * multiple
            if multiple > 1 and low <= size <= high:
                return size


def case(op: Op, draws: Draws) -> Case:
    """The next case of an operation that is served, and neither too small nor too large."""
    if op.draw is None:
        raise ValueError(f"op is {op.name!r}, must be one that a public function is called with: it draws no cases")
    draws.next()
    while True:
        drawn = op.draw(draws)
        if not op.accepts(drawn.case) and _suits(op, drawn):
            return drawn.case


def least_us(op: Op, drawn: Drawn) -> float:
    """What a call takes on the reference GPU at its measured ceilings; PyTorch takes no less."""
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

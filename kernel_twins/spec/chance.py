"""Random cases: options are dealt in turn, sizes are drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

_T = TypeVar("_T")

MULTIPLES = (64, 64, 8, 1)
"""Sizes are multiples of these, in turn; 1 stands for sizes that 8 does not divide."""


class Draws:
    """A source of cases. ``fixed`` holds options that are not dealt, because a public function offers no choice.

    Options are dealt like cards: each once, in random order, then all anew. An option is dealt once for each case,
    however often the case's sizes are drawn.
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
        """A log-uniform whole number."""
        return min(high, max(low, round(math.exp(self._random.uniform(math.log(low), math.log(high))))))

    def size(self, low: int, high: int) -> int:
        """A log-uniform size: a multiple of 64, of 8, or not divisible by 8, the same for all sizes of a case."""
        multiple = self.deal("multiple", MULTIPLES)
        while True:
            size = self.number(low, high)
            if multiple == 1 and size % 8:
                return size
            size = round(size / multiple) * multiple
            if multiple > 1 and low <= size <= high:
                return size

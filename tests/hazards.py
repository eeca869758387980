"""Overwrites of registers that a wgmma reads, in a kernel as it is, and as it would be with its waits broken."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from kernel_twins.compiler.wgmma_hazards import Listing, overwrites


class Overwrites(NamedTuple):
    """How many there are in a listing, and how many there would be without its waits, or with laxer waits."""

    as_it_is: int
    without_waits: int
    too_lax: int

    @classmethod
    def of(cls, listing: Listing) -> Self:
        lax = max(len(overwrites(too_lax(listing, groups))) for groups in (1, 2))
        return cls(len(overwrites(listing)), len(overwrites(without_waits(listing))), lax)

    def require_none(self, kernel: str) -> None:
        """None; and the kernel would be found out if a wait were missing, or waited for a group or two less.

        Two, where products from registers alternate with others, as in attention.
        """
        assert self.as_it_is == 0, kernel
        assert self.without_waits > 0, kernel
        assert self.too_lax > 0, kernel


def without_waits(given: Listing) -> Listing:
    return [(address, "NOP" if "WARPGROUP.DEPBAR" in text else text) for address, text in given]


def too_lax(given: Listing, groups: int) -> Listing:
    def laxer(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2], 16) + groups:#x}"

    return [(address, re.sub(r"(DEPBAR\.LE gsb0, )(0x[0-9a-f]+)", laxer, text)) for address, text in given]

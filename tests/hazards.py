"""Overwrites of registers that a wgmma reads, in a kernel as it is, and as it would be with its waits broken."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from kernel_twins.compiler.wgmma_hazards import Listing, overwrites


class Overwrites(NamedTuple):
    """How many there are in a listing, and how many there would be without its waits, or with laxer waits."""

    as_it_is: int
    without_waits: int
    a_group_too_lax: int
    two_groups_too_lax: int

    @classmethod
    def of(cls, listing: Listing) -> Self:
        broken = without_waits(listing), too_lax(listing, 1), too_lax(listing, 2)
        return cls(*(len(overwrites(each)) for each in (listing, *broken)))

    def require_none(self, kernel: str, *, alternates: bool = False, has_few: bool = False) -> None:
        """None; and the kernel would be found out if a wait were missing, or waited for a group less.

        For two less, where a kernel ``alternates`` products from registers with others, as attention does. One that
        ``has_few`` groups in flight is always waited for whole.
        """
        assert self.as_it_is == 0, kernel
        assert self.without_waits > 0, kernel
        if has_few:
            return
        assert (self.two_groups_too_lax if alternates else self.a_group_too_lax) > 0, kernel


def without_waits(given: Listing) -> Listing:
    return [(address, "NOP" if "WARPGROUP.DEPBAR" in text else text) for address, text in given]


def too_lax(given: Listing, groups: int) -> Listing:
    def laxer(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2], 16) + groups:#x}"

    return [(address, re.sub(r"(DEPBAR\.LE gsb0, )(0x[0-9a-f]+)", laxer, text)) for address, text in given]

"""The kind of a mask, which tells problems apart where a tile is searched."""

from __future__ import annotations


def mask_of(first: int, last: int, before: int, behind: int) -> str:
    """What a band cuts, by which query i sees the keys from i + first to i + last.

    "full" where every query sees every key, "causal" where keys are hidden behind a query alone, else "window".
    ``before`` and ``behind`` are the limits that reach past every key, -Sq and Sk of a band that starts at query 0.
    """
    if first > before + 1:
        return "window"
    return "causal" if last < behind - 1 else "full"

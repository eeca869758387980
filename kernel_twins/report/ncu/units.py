"""Units as ncu prints them, and the base units that everything is stored in: ns, byte, hz, byte/s, and counts as is.

ncu scales by thousands, never by 1024, and its versions spell the same unit in several ways: ``us`` and ``usecond``,
``Ghz`` and ``cycle/nsecond``, ``Tbyte/s`` and ``Tbyte/second``.
"""

from __future__ import annotations

from decimal import Decimal

from kernel_twins.report.rows.base import InvalidDataError

_PREFIXES = {"p": -12, "n": -9, "u": -6, "m": -3, "K": 3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
"""Power of ten of each prefix."""
_SCALED = {"s": "s", "second": "s", "hz": "hz", "Hz": "hz", "byte": "byte"}
"""Spellings of what takes any prefix."""
_COUNTS = (
    "bank", "block", "cluster", "conflict", "context", "cta", "cycle", "device", "flop", "gpc", "inst", "instruction",
    "launch", "op", "pass", "ratio", "register", "request", "sector", "sm", "SM", "stage", "thread", "transaction",
    "warp", "wave", "wavefront",
)  # fmt: skip
"""What is counted; a prefix only multiplies it."""
_SIDES = {
    prefix + name: (power, base)
    for prefix, power in (_PREFIXES | {"": 0}).items()  # what has no prefix comes last, and so wins
    for name, base in (_SCALED | {name: name for name in _COUNTS}).items()
    if power >= 0 or name in _SCALED
}
"""Power of ten and base unit of all that can stand on one side of a slash."""


def to_base(value: float | Decimal, unit: str, metric: str) -> tuple[float, str]:
    """A value and its unit, in base units: ``177.28 us`` is ``177280 ns``, ``1.5 Ghz`` is ``1.5e9 hz``.

    The result is the double nearest to the decimal number that was printed, so that no digit is lost on the way.
    InvalidDataError names the metric and its unit, where that is none of those known.
    """
    exponent, base = _parse(unit, metric)
    if isinstance(value, Decimal):
        return float(value.scaleb(exponent)), base
    return (value, base) if exponent == 0 else (float(Decimal(str(value)).scaleb(exponent)), base)


def _parse(unit: str, metric: str) -> tuple[int, str]:
    """The power of ten that leads to the base unit, and that unit."""
    if unit in ("", "%"):
        return 0, unit
    try:
        (exponent, base), *rest = [_SIDES[side] for side in unit.split("/", 1)]
    except KeyError:
        raise InvalidDataError(
            f"unit of {metric} is {unit!r}; known are {', '.join(sorted({*_SCALED, *_COUNTS, '%'}))}, with a prefix of "
            f"{', '.join(_PREFIXES)}, alone or one over another (byte/s)"
        ) from None
    if not rest:
        return (exponent + 9, "ns") if base == "s" else (exponent, base)
    exponent -= rest[0][0]
    return (exponent, "hz") if (base, rest[0][1]) == ("cycle", "s") else (exponent, f"{base}/{rest[0][1]}")

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
    above, slash, below = unit.partition("/")
    sides = [_side(side) for side in ((above, below) if slash else (above,))]
    if None in sides:
        raise InvalidDataError(
            f"unit of {metric} is {unit!r}; known are {', '.join(sorted({*_SCALED, *_COUNTS, '%'}))}, with a prefix of "
            f"{', '.join(_PREFIXES)}, alone or one over another (byte/s)"
        )
    (exponent, base), *rest = [side for side in sides if side is not None]
    if not rest:
        return (exponent + 9, "ns") if base == "s" else (exponent, base)
    exponent -= rest[0][0]
    return (exponent, "hz") if (base, rest[0][1]) == ("cycle", "s") else (exponent, f"{base}/{rest[0][1]}")


def _side(text: str) -> tuple[int, str] | None:
    """One side of a unit, or None where it is unknown."""
    if text in _SCALED or text in _COUNTS:
        return 0, _SCALED.get(text, text)
    exponent, rest = _PREFIXES.get(text[:1]), text[1:]
    if exponent is None or not (rest in _SCALED or (rest in _COUNTS and exponent > 0)):
        return None
    return exponent, _SCALED.get(rest, rest)

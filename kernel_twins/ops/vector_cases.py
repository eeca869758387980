"""Cases on which the operations on vectors are tested and timed."""

from __future__ import annotations

from kernel_twins.spec import ITEMSIZE, Case, SizeAxis

SIZE_AXIS = SizeAxis("elements", lambda case: case.shape[0])
BENCH_CASES = tuple(Case.of(2**k, dtype=dtype) for dtype in ("fp32", "bf16") for k in (30, 28, 26, 24, 22, 20, 18, 16))
PROFILE_CASE = Case.of(2**26, dtype="fp32")


def test_cases(*more: tuple[int, dict[str, str]]) -> tuple[Case, ...]:
    """Test cases in every dtype: few and many elements, unaligned, infinite, NaN, and ``more``; and two matrices."""
    return (
        *(
            Case.of(n, dtype=dtype, **variant)
            for dtype in ITEMSIZE
            for n, variant in (
                (0, {}),
                (1, {}),
                (127, {}),
                (1_000, {}),
                (4_096, {}),
                (65_537, {}),
                (1_000_003, {}),
                (1_003, {"offset": "1"}),
                (262_144, {"offset": "1"}),
                (1_003, {"values": "inf"}),
                *more,
            )
        ),
        Case.of(17, 33, dtype="fp32"),
        Case.of(0, 5, dtype="bf16"),
    )

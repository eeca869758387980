"""Attention's cases cover sizes that 32 bits do not count."""

from __future__ import annotations

import math

from kernel_twins import OPS
from kernel_twins.ops.attention import shared

OP = OPS["attention"]


def test_cases_have_more_elements_of_queries_and_of_keys_than_32_bits_count() -> None:
    queries = [math.prod(case.shape) for case in OP.huge_cases]
    keys = [case.shape[0] * shared.kv_heads_of(case) * shared.keys_of(case) * case.shape[3] for case in OP.huge_cases]
    assert max(queries) > 2**31 and max(keys) > 2**31
    for case in OP.huge_cases:
        assert {OP.last_step(backend, case) for backend in ("cuda", "triton")} == {OP.steps[-1]}

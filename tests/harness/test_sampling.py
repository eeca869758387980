"""Cases that nobody chose: within their bounds, in turn, served, and the same for the same seed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_twins import OPS
from kernel_twins.harness import sampling
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.calls.sampled_cases import CASES, cases, is_compiled, op_of, seed_of
from kernel_twins.spec import Case, Drawn
from kernel_twins.spec.chance import Draws

DRAWN = [op for op in OPS.values() if op.draw]
BY_OP = pytest.mark.parametrize("op", DRAWN, ids=lambda op: op.name)
MANY = 2_000
ROOT = Path(__file__).resolve().parents[2]


def multiple(*sizes: int) -> int:
    return next(each for each in (64, 8, 1) if all(size % each == 0 for size in sizes))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_seed_gives_a_function_its_cases(function: str, seed: int) -> None:
    drawn = cases(function, seed)
    assert drawn == cases(function, seed)
    assert len({*drawn}) == CASES
    for case in drawn:
        op = OPS[op_of(function, case)]
        assert not op.accepts(case)
        assert case == Case.parse(case.slug)
        assert 0 not in case.shape
        assert op.bytes(case) <= 4 * 2**30
        assert op.flops(case) <= 2e12
        assert sampling.least_us(op, Drawn(case, case.shape[0])) >= 10
    for key, value in {"log_softmax": ("log", "yes"), "amax": ("kind", "max"), "argmax": ("kind", "argmax")}.items():
        assert function != key or {case.get(value[0]) for case in drawn} == {value[1]}
    assert {case.dtype for case in drawn} >= {"bf16", "fp16"}


def test_other_seeds_and_functions_have_other_cases() -> None:
    assert cases("softmax", 1) != cases("softmax", 2)
    assert [case.shape for case in cases("softmax", 1)] != [case.shape for case in cases("log_softmax", 1)]
    assert seed_of("2026-12-01-abc123") != seed_of("2026-12-01-abc124")


def test_the_cases_of_a_seed_stay_what_they_are() -> None:
    assert [case.slug for case in cases("softmax", 1)[:2]] == EXPECTED["softmax"]
    assert [case.slug for case in cases("matmul", 1)[:2]] == EXPECTED["matmul"]


EXPECTED = {
    "softmax": ["2x291520-fp16", "66059x208-fp32-x.spaced"],
    "matmul": ["1332x24199x46-bf16-a.col", "8797x2304x704-fp16-b.col"],
}


@BY_OP
def test_layouts_options_and_dtypes_take_turns(op) -> None:
    draws = Draws(3)
    drawn = [sampling.case(op, draws) for _ in range(MANY)]
    dtypes = Counter(case.dtype for case in drawn)
    assert max(dtypes.values()) - min(dtypes.values()) <= 1
    variants = Counter(key for case in drawn for key, _ in case.variant)
    layout = {"softmax": "x", "layer_norm": "x", "rms_norm": "x", "dropout_add": "x", "cross_entropy": "logits"}
    if op.name in layout:
        assert abs(variants[layout[op.name]] - MANY / 2) <= 2


def test_half_the_sizes_are_multiples_of_64_a_quarter_of_8_and_a_quarter_of_neither() -> None:
    draws = Draws(3)
    found = Counter(multiple(sampling.case(OPS["softmax"], draws).shape[1]) for _ in range(MANY))
    assert found[64] >= MANY / 2  # a multiple of 8 may be one of 64
    assert found[64] + found[8] == 3 * MANY / 4
    draws = Draws(4)
    products = [sampling.case(OPS["matmul_bf16"], draws).shape for _ in range(MANY)]
    layers = [shape for shape in products if shape[0] <= 16_384 and shape[2] % 64 == 0]
    assert len(layers) >= MANY / 2
    assert sum((n >= 32_000 and n % 64 != 0) or n > 32_768 for _, n, _ in products) >= MANY / 20
    assert max(n for _, n, _ in products) == 262_144
    assert sum(multiple(*shape) == 1 for shape in products) >= MANY / 8


def test_a_sixth_of_the_rows_are_few_and_very_long() -> None:
    draws = Draws(5)
    shapes = [sampling.case(OPS["softmax"], draws).shape for _ in range(MANY)]
    long = [(m, n) for m, n in shapes if n > 2**17]
    assert abs(len(long) - MANY / 6) <= 2
    assert all(m <= 64 and n <= 2**24 for m, n in long)
    assert min(m for m, _ in long) == 1


def test_a_few_rows_are_not_read_at_the_memorys_rate() -> None:
    op, case = OPS["softmax"], Case.of(1, 2**20, dtype="bf16")
    assert sampling.least_us(op, Drawn(case)) < 10 < sampling.least_us(op, Drawn(case, 1))


def test_options_are_dealt_once_a_case_and_as_cards_are() -> None:
    draws = Draws(0, {"fixed": "yes"})
    hands = []
    for _ in range(12):
        draws.next()
        hand = draws.deal("letter", "abc")
        assert draws.deal("letter", "abc") == hand
        assert draws.deal("fixed", ("yes", "no")) == "yes"
        hands.append(hand)
    assert all(sorted(hands[first : first + 3]) == ["a", "b", "c"] for first in range(0, 12, 3))


def test_operations_without_a_public_function_draw_none() -> None:
    with pytest.raises(
        ValueError, match=r"^op is 'softmax_backward', must be one that a public function is called with"
    ):
        sampling.case(OPS["softmax_backward"], Draws(0))


def test_every_operation_that_draws_is_drawn() -> None:
    assert {op for function in FUNCTIONS.values() for op in function.drawn} == {op.name for op in DRAWN}
    assert sum(map(is_compiled, range(CASES))) == 8


def test_sampling_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'triton')))\n"
        "from kernel_twins.report.calls.sampled_cases import cases\n"
        "print(len(cases('matmul', 1)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "24\n"), done.stderr

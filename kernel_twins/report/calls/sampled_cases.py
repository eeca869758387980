"""What the public functions are timed on that nobody chose: the cases that a recording's seed draws.

Neither torch nor a GPU is needed.
"""

from __future__ import annotations

import hashlib

from kernel_twins import ops
from kernel_twins.harness import sampling
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.spec import Case
from kernel_twins.spec.chance import Draws

CASES = 24  # of a function, in a recording
_COMPILED_EVERY = 3  # that many cases one is timed with torch.compile, too


CONTESTS = tuple((function, direction) for function, of in FUNCTIONS.items() for direction in of.passes)


def seed_of(run: str) -> int:
    """A recording's seed, which nobody chooses either: of the run's id."""
    return int(hashlib.sha256(run.encode()).hexdigest()[:8], 16)


def cases(function: str, seed: int) -> list[Case]:
    """A function's cases in a recording, none of them twice."""
    of = FUNCTIONS[function]
    turns, draws = Draws(f"{seed} {function} op"), Draws(f"{seed} {function}", of.fixed)
    found: dict[Case, None] = {}
    while len(found) < CASES:
        turns.next()
        found.setdefault(sampling.case(ops.get(turns.deal("op", of.drawn)), draws))
    return list(found)


def op_of(function: str, case: Case) -> str:
    """The operation that a function's case is one of."""
    return next(op for op in FUNCTIONS[function].drawn if not ops.get(op).accepts(case))


def is_compiled(index: int) -> bool:
    """Whether a function's case of that number is timed with torch.compile, too."""
    return index % _COMPILED_EVERY == 0

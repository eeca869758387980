"""What the public functions are timed on that nobody chose: the functions, and the cases that a recording's seed draws.

Neither torch nor a GPU is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from kernel_twins import ops
from kernel_twins.harness import sampling
from kernel_twins.spec import Case, Draws

Pass = Literal["forward", "backward"]

CASES = 24  # of a function, in a recording
_COMPILED_EVERY = 3  # that many cases one is timed with torch.compile, too


@dataclass(frozen=True, slots=True)
class Sampled:
    """A public function: the operations that it is called with, in turn, and what it has no choice of."""

    ops: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    passes: tuple[Pass, ...] = ("forward", "backward")


FUNCTIONS: Mapping[str, Sampled] = {
    "matmul": Sampled(("matmul_bf16", "matmul_bf16", "matmul_fp32")),
    "linear": Sampled(("linear",)),
    "softmax": Sampled(("softmax",), {"options": {}}),
    "log_softmax": Sampled(("softmax",), {"options": {"log": "yes"}}),
    "layer_norm": Sampled(("layer_norm",)),
    "rms_norm": Sampled(("rms_norm",)),
    "cross_entropy": Sampled(("cross_entropy",)),
    "cross_entropy_gradient_": Sampled(("cross_entropy",), passes=("forward",)),
    "dropout_add": Sampled(("dropout_add",)),
    "sum": Sampled(("reduction_nd",), {"kind": "sum"}, passes=("forward",)),
    "mean": Sampled(("reduction_nd",), {"kind": "mean"}),
    "amax": Sampled(("reduction_nd",), {"kind": "max"}),
    "argmax": Sampled(("reduction_nd",), {"kind": "argmax"}, passes=("forward",)),
}
"""A sum's gradient is a view, for which no kernel runs; argmax has none; cross_entropy_gradient_ is one itself."""

CONTESTS = tuple((function, direction) for function, sampled in FUNCTIONS.items() for direction in sampled.passes)


def seed_of(run: str) -> int:
    """A recording's seed, which nobody chooses either: of the run's id."""
    return int(hashlib.sha256(run.encode()).hexdigest()[:8], 16)


def cases(function: str, seed: int) -> list[Case]:
    """A function's cases in a recording, none of them twice."""
    sampled = FUNCTIONS[function]
    turns, draws = Draws(f"{seed} {function} op"), Draws(f"{seed} {function}", sampled.fixed)
    found: dict[Case, None] = {}
    while len(found) < CASES:
        turns.next()
        found.setdefault(sampling.case(ops.get(turns.deal("op", sampled.ops)), draws))
    return list(found)


def op_of(function: str, case: Case) -> str:
    """The operation that a function's case is one of."""
    return next(op for op in FUNCTIONS[function].ops if not ops.get(op).accepts(case))


def is_compiled(index: int) -> bool:
    """Whether a function's case of that number is timed with torch.compile, too."""
    return index % _COMPILED_EVERY == 0

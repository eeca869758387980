"""The Triton steps, compiled ahead of time for both architectures, each kernel once: what the tests ask of them.

A step is compiled in a process of its own (forks.py), as the compiler keeps its memory. What comes back are facts, not
kernels, and these are kept in the user's cache until a file that they come from changes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernel_twins import ops
from kernel_twins.compiler import aot, disassembly, wgmma_hazards
from kernel_twins.ops.ptx import TENSOR_CORES
from kernel_twins.spec import Case, Op, Step
from tests import forks
from tests.hazards import Overwrites

SHARED_LIMIT = {80: 166_912, 90: 232_448}  # bytes of shared memory that a block can have, by architecture
EVERY_PAIR = os.environ.get("EVERY_PAIR") == "1"
"""``make portability``: each configuration with each case; else the first with each, and each other one with one."""


@dataclass(frozen=True)
class Kernel:
    """``stack_bytes`` are a thread's, which is where registers spill to.

    ``instructions`` are the patterns of ``sought`` that the PTX holds, ``overwrites`` what becomes of registers that a
    wgmma reads: None where none reads any.
    """

    name: str
    shared_bytes: int
    stack_bytes: int
    instructions: tuple[str, ...]
    overwrites: Overwrites | None


@dataclass(frozen=True)
class Compiled:
    """What one call launches, by a configuration, or by what the reference GPU runs."""

    case: str
    odd: bool
    reference: bool
    settings: dict[str, Any]
    kernels: tuple[Kernel, ...]


def aligned_cases(op: Op, step: Step) -> list[Case]:
    """For every dtype and variant that a step is timed on, the last case whose sizes all tiles divide.

    Of the wide cases that is one with few tiles, among which every split of K is possible. Attention's tiles divide its
    lengths alone. A step's own profile case is one of them, too, if small tiles divide it.
    """

    def tiled(case: Case) -> tuple[int, ...]:
        return case.shape[2:3] if "band" in op.options(case) else case.shape

    even = [case for case in op.timed_cases if op.times(step, case) and all(n % 512 == 0 for n in tiled(case))]
    last = {(case.dtype, case.variant): case for case in even}.values()
    own = step.profile_case.get("triton")
    return list(dict.fromkeys([*last, own] if own and all(n % 16 == 0 for n in tiled(own)) else last))


def odd_cases(op: Op, step: Step) -> list[Case]:
    """The timed cases with an odd size that a step serves, or the largest such test case."""
    timed, tested = (
        [case for case in cases if op.serves(step, case) and any(n % 2 for n in case.shape)]
        for cases in (op.bench_cases, op.test_cases)
    )
    return timed or [max(tested, key=op.bytes)]


def sought(step: Step, arch: int) -> list[str]:
    """The patterns that are looked for in a step's PTX: what the spec promises, and any use of the tensor cores."""
    return [
        *step.promises.get(arch, ()),
        *(each.instruction for each in step.promises_where.get(arch, ())),
        TENSOR_CORES,
    ]


@cache
def compiled(op: str, step: str, arch: int) -> list[Compiled]:
    """All calls of a step that are compiled, first those by a configuration, in the order of the step's list."""
    calls = forks.call("tests.compiled", "compile_all", op, step, arch, EVERY_PAIR)
    return [Compiled(**call | {"kernels": tuple(_kernel(**each) for each in call["kernels"])}) for call in calls]


def of_list(op: str, step: str, arch: int, odd: bool = False) -> list[Compiled]:
    """By every configuration that the step may be tuned to."""
    return [call for call in compiled(op, step, arch) if not call.reference and call.odd == odd]


def _kernel(instructions: list[str], overwrites: list[int] | None, **others: Any) -> Kernel:
    return Kernel(
        **others, instructions=tuple(instructions), overwrites=None if overwrites is None else Overwrites(*overwrites)
    )


# ----------------------------------------------------------------------------------------------------------------------
# In the fork
# ----------------------------------------------------------------------------------------------------------------------


def compile_all(op_name: str, step_name: str, arch: int, every_pair: bool) -> list[dict[str, Any]]:
    op = ops.get(op_name)
    step = op.step(step_name)
    configs, aligned, odd = aot.configs(op, step), aligned_cases(op, step), odd_cases(op, step)
    known: dict[str, dict[str, Any]] = {}  # by hash: the same kernel serves cases of one alignment

    def call(case: Case, config: Any = None, reference: bool = False) -> dict[str, Any]:
        kernels = aot.compiled(op, step, case, arch, config)
        for kernel in kernels:
            if kernel.hash not in known:
                known[kernel.hash] = _facts(kernel, sought(step, arch))
        settings = config.kwargs if config else {}
        facts = [known[kernel.hash] for kernel in kernels]
        return {"case": case.slug, "odd": case in odd, "reference": reference, "settings": settings, "kernels": facts}

    if every_pair:
        pairs = [(config, case) for case in (*aligned, *odd) for config in configs]
    else:
        # The first configuration runs where nothing can be searched. The splits of K are in the wide cases alone.
        pairs = [(configs[0], case) for case in (*aligned, *odd)]
        turns = [case for case in aligned if case in op.wide_cases] or aligned
        pairs += [(config, turns[i % len(turns)]) for i, config in enumerate(configs[1:])]
    return [call(case, config) for config, case in pairs] + [call(case, reference=True) for case in aligned]


def _facts(kernel: Any, patterns: list[str]) -> dict[str, Any]:
    with aot.cubin(kernel) as cubin:
        listings = wgmma_hazards.kernels(cubin)
        stack_bytes = disassembly.resource_usage(cubin)[kernel.name].stack_bytes
    return {
        "name": kernel.name,
        "shared_bytes": kernel.metadata.shared,
        "stack_bytes": stack_bytes,
        "instructions": [pattern for pattern in patterns if re.search(pattern, kernel.asm["ptx"])],
        "overwrites": Overwrites.of(listings[kernel.name]) if listings else None,
    }

"""What the chip allows an operation, as far as it was surveyed, and how close its steps come to it."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_twins import OPS
from kernel_twins.harness.ceilings import Ceilings
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import BACKENDS, Backend, Case, Name

MEMORIES = ("dram", "l2")

SPLIT = "matmul_tf32x3"  # fp32 products by tensor cores, whose ceiling in the spec is what it is compared with
_PRODUCTS, _BF16_OVER_TF32 = 3, 2


def pipe_of(op: str, ceilings: Ceilings) -> tuple[str, float]:
    """The arithmetic's roof: its name, and TFLOP/s.

    Of three TF32 products it is computed: a TF32 product runs at half the rate of a bf16 one, which was surveyed.
    """
    if op == SPLIT:
        return "3 × TF32", ceilings.bf16 / (_PRODUCTS * _BF16_OVER_TF32)
    return ("bf16 tensor", ceilings.bf16) if OPS[op].ceiling == "bf16" else ("fp32 FMA", ceilings.fp32)


def roof_at(op: str, intensity: float, ceilings: Ceilings) -> float:
    """TFLOP/s at that many FLOP a byte of device memory."""
    return min(pipe_of(op, ceilings)[1], intensity * ceilings.dram_read / 1e3)


def limits(op: str, ceilings: Ceilings) -> list[tuple[str, float]]:
    """The lines in a ladder's figure, each with its name: what the spec names, and what the pipe in use allows.

    GB/s where the operation waits for memory, else TFLOP/s.
    """
    ceiling = OPS[op].ceiling
    if ceiling.startswith("dram"):
        return [(ceiling.replace("dram", "DRAM").replace("_", " "), getattr(ceilings, ceiling))]
    pipe = pipe_of(op, ceilings)
    return list(dict.fromkeys([("fp32 FMA" if ceiling == "fp32" else pipe[0], getattr(ceilings, ceiling)), pipe]))


@dataclass(frozen=True, slots=True)
class Path:
    """A ladder in a language: steps' names, FLOP a byte, TFLOP/s."""

    op: str
    backend: Backend
    steps: tuple[tuple[str, float, float], ...]


def paths(results: Results) -> list[Path]:
    """Of the steps that were timed and profiled."""
    op, found = results.op, []
    for backend in BACKENDS:
        steps = []
        for step in op.steps_of(backend):
            case = op.profile_case_of(step, backend)
            at = point(results, case, Name(backend, step.name)) if case else {}
            if "dram_intensity" in at:
                steps.append((step.name, at["dram_intensity"], at["tflops"]))
        if steps:
            found.append(Path(op.name, backend, tuple(steps)))
    return found


def point(results: Results, case: Case, name: Name) -> dict[str, float]:
    """Where a call stands under the roofs: ``tflops``, and FLOP a byte by the memory that moved them.

    Those are ``dram_intensity`` and ``l2_intensity``, as far as they were counted; empty without a time.
    """
    time = results.time_us(case, name)
    if not time:
        return {}
    flops, quantities = results.op.flops(case), results.quantities(name, case)
    moved = {memory: quantities[f"{memory}_bytes"] for memory in MEMORIES}
    return {
        "tflops": flops / time / 1e6,
        **{f"{memory}_intensity": flops / (1e6 * megabytes) for memory, megabytes in moved.items() if megabytes},
    }

"""What a run would measure and how long it would take, told before any of it is measured.

No GPU and no torch are needed: times a call come from the committed measurements of the reference GPU, so the
prediction is for that GPU. A baseline without one is taken to run as the fastest other one does, any other cell at a
fraction of its operation's ceiling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_twins.harness import ceilings
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.calls.sampled_cases import CASES, CONTESTS
from kernel_twins.report.measure.proton import CALLS as PROTON_CALLS
from kernel_twins.report.measure.selection import Selection
from kernel_twins.report.rows import libraries, store
from kernel_twins.report.rows.base import OK
from kernel_twins.report.rows.metrics import PASSES, Tier
from kernel_twins.report.rows.recorded import CONDITIONS, Recorded, median_us
from kernel_twins.spec import BACKENDS, Case, Name, Op

# How bench.py spends its time; it imports torch, so they are written down again here, and a test compares.
ROUNDS = 20
CONDITION_ROUNDS = 10
REST_MS = 20.0
REST = 5.0
CHAIN_S = 1.0
SAMPLE_MS = 1.0
SETTLED_MS = 20.0
L2_MULTIPLE = 3

_L2_BYTES = 50 * 2**20
_CAPABILITY = (9, 0)
PROCESSES = 2  # an operation: counters, then cycles; with Proton its own, then one that tells Triton's code
T0_CALLS = 10  # calls a cell whose cycles are recorded, beside the one with the tier's counters
# Fitted to three commands on the reference GPU at tier T3, which recorded all operations, and to two of seven of them.
_START_S = 20.0  # torch, and the digests of all CUDA steps, which are kept from then on
_AHEAD_S = 15.0  # imports of the processes that compile
_COMPILERS = 16  # of them: the cores of that machine
_COMPILED_S = 1.0  # a cell that there is something to compile for, in one of them
_KEPT_S = {"compile": 1.28, "quack": 0.32}  # a case: the gate, loading from the caches, torch.compile's searches
_SEARCH_S = {"max_autotune": 3.0}  # of configurations, for one more shape
_READY_S = 9.0  # imports of a profiled process: beside the timing with ncu, after it with Proton
_LOADING_S = 4.6  # of a profiled process that is ready: set-up, all first calls, what is left of its report
_REPLAY_S = 0.0295  # one pass over one launch: flush, restore, counters in and out
# Fitted to runs of eight operations when nothing was compiled ahead, as for a single case.
_CELL_S = 0.118  # the gate against float64, Triton's compilation, capture
_MAKING_S = {"compile": 1.25, "quack": 1.0}  # a case, by the baseline
# Fitted to two recordings of cases that nobody chose.
_CASE_COMPILED_S = 0.45  # a case, in many processes at once
_SAMPLED_S = 0.55  # a contest: checks against float64, graphs, rounds
_GUESSED_SHARE = 0.3  # of the ceiling, for a cell that was never timed


@dataclass(frozen=True, slots=True)
class OpPlan:
    """One operation's share: ``guessed`` timed cells have no committed time; ``passes`` are kernel replays."""

    op: str
    timed_cells: int
    guessed: int
    profiled_cells: int
    passes: int
    timing_s: float
    profiling_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    tier: Tier
    tool: str
    gpu: str
    operations: tuple[OpPlan, ...]
    compiling_s: float
    start_s: float = _START_S

    @property
    def sampled_s(self) -> tuple[float, float]:
        """Apart from all else: of `sampled --compile`, and of `sampled`."""
        return _START_S + _CASE_COMPILED_S * len(FUNCTIONS) * CASES, _START_S + _SAMPLED_S * len(CONTESTS) * CASES

    @property
    def seconds(self) -> float:
        return self.start_s + self.compiling_s + sum(each.timing_s + each.profiling_s for each in self.operations)


def plan(selection: Selection, tier: Tier, tool: str) -> Plan:
    """What collecting the selection would do with ``tool`` (``ncu`` or ``proton``)."""
    cases = [(op, case) for op in selection.ops for case in selection.cases(op)]
    ahead = len(cases) > 1  # as collect_compile.py has it
    compiled = sum(
        name.backend in ("triton", *libraries.COMPILED) for op in selection.ops for _, name in _cells(op, selection)
    )
    return Plan(
        tier,
        tool,
        store.REFERENCE_GPU,
        tuple(_operation(op, selection, tier, tool, ahead) for op in selection.ops),
        round(_AHEAD_S + _COMPILED_S * compiled / min(len(cases), _COMPILERS), 1) if ahead else 0.0,
    )


def run(selection: Selection, tier: Tier, tool: str, as_json: bool) -> int:
    """Print the plan to stdout, as a table or as JSON."""
    planned = plan(selection, tier, tool)
    if as_json:
        sums = {"seconds": round(planned.seconds, 1), "sampled_s": [round(each, 1) for each in planned.sampled_s]}
        print(json.dumps(asdict(planned) | sums, indent=2))
        return OK
    rows = [
        (each.op, each.timed_cells, each.profiled_cells, each.passes, f"{each.timing_s:.0f}", f"{each.profiling_s:.0f}")
        for each in planned.operations
    ]
    header = ["operation", "timed cells", "profiled cells", "passes", "timing s", "profiling s"]
    print(pd.DataFrame(rows, columns=header).to_string(index=False))
    guessed = sum(each.guessed for each in planned.operations)
    print(
        f"\n{'tier ' + tier + ' with ncu' if tool == 'ncu' else tool}: about {planned.seconds / 60:.1f} minutes on one "
        f"{planned.gpu}, {planned.start_s + planned.compiling_s:.0f} s of it before the first operation"
        + (f"; {guessed} cells were never timed there and are guessed" if guessed else "")
    )
    compiling, timing = (each / 60 for each in planned.sampled_s)
    print(
        f"apart from it, cases that nobody chose: `sampled --compile` about {compiling:.1f} minutes, `sampled` about "
        f"{timing:.1f}"
    )
    return OK


def _operation(op: Op, selection: Selection, tier: Tier, tool: str, ahead: bool) -> OpPlan:
    making_s = (_KEPT_S if ahead else _MAKING_S) | _SEARCH_S
    cell_s = 0.0 if ahead else _CELL_S
    names, cells = _names(op, selection), _cells(op, selection)
    recorded = Recorded(op, store.DATA / store.REFERENCE_GPU).rows
    rows = {(case, name): _sustained_ms(recorded.get((case.slug, name), {})) for case, name in cells}
    known = {
        (case, name): [_guess_ms(op, case, name, rows)] if found is None else found
        for (case, name), found in rows.items()
    }
    sustained_s = sum(
        cell_s + making_s.get(name.backend, 0.0) + sum(_rounds_s(op, case, each) for each in found)
        for (case, name), found in known.items()
    )
    conditions_s = sum(_conditions_s(op, case, known) for case in selection.cases(op) if case in op.condition_cases)
    profiled = [name for _, name in selection.profiled(op) if name in names]
    launches = sum(op.step(name.step).launches or 1 if name.step else 1 for name in profiled)
    passes = launches * (PASSES[tier] + T0_CALLS * PASSES["T0"] if tool == "ncu" else PROTON_CALLS)
    timing_s = sustained_s + conditions_s
    processes_s = max(0.0, _READY_S - timing_s) if tool == "ncu" else PROCESSES * _READY_S
    processes_s += PROCESSES * _LOADING_S
    return OpPlan(
        op.name,
        len(cells),
        sum(found is None for found in rows.values()),
        len(profiled),
        passes,
        round(timing_s, 1),
        round(processes_s + passes * (_REPLAY_S if tool == "ncu" else 0), 1) if profiled else 0.0,
    )


def _names(op: Op, selection: Selection) -> list[Name]:
    """The baselines and references, and the steps that are meant and that the reference GPU runs."""
    return [Name(other) for other in (*op.baselines, *op.references)] + [
        name for name in selection.names(op) if op.step(name.step).runs_on(_CAPABILITY)
    ]


def _cells(op: Op, selection: Selection) -> list[tuple[Case, Name]]:
    """What is timed."""
    names = _names(op, selection)
    return [(case, name) for case in selection.cases(op) for name in names if _times(op, name, case)]


def _times(op: Op, name: Name, case: Case) -> bool:
    return op.times(op.step(name.step), case) if name.step else name.backend in (*op.baselines_at(case), *op.references)


def _sustained_ms(rows: Mapping[str, Any]) -> list[float] | None:
    """Milliseconds of a call in each of its contests that has a time; None where it was in none."""
    found = [row for contest, row in rows.items() if contest in (*CONDITIONS["sustained"], "")]
    return [median_us(row) / 1e3 for row in found if row.times_us] if found else None


def _guess_ms(op: Op, case: Case, name: Name, rows: Mapping[tuple[Case, Name], list[float] | None]) -> float:
    """Of a new baseline what the fastest known one takes; of anything else a fraction of the ceiling."""
    others = [found[0] for other in op.baselines if (found := rows.get((case, Name(other))))]
    if others and not name.step:
        return min(others)
    limits = ceilings.load(store.REFERENCE_GPU)
    memory_ms = op.bytes(case) / limits.dram_copy / 1e6
    arithmetic_ms = op.flops(case) / (limits.bf16 if op.ceiling == "bf16" else limits.fp32) / 1e9
    return max(memory_ms, arithmetic_ms) / _GUESSED_SHARE


def _rounds_s(op: Op, case: Case, call_ms: float) -> float:
    """Seconds of all rounds of a call: each replays a sample's graph, and before it once more where it is short."""
    sample_ms = _sample_ms(op, case, call_ms)
    return ROUNDS * sample_ms * (2 if sample_ms < SETTLED_MS else 1) / 1e3


def _sample_ms(op: Op, case: Case, call_ms: float) -> float:
    if call_ms >= SETTLED_MS:
        return call_ms
    sets = math.ceil(L2_MULTIPLE * _L2_BYTES / max(1, op.bytes(case)))
    return call_ms * max(sets, math.ceil(SAMPLE_MS / max(call_ms, 1e-3)))


def _conditions_s(op: Op, case: Case, known: Mapping[tuple[Case, Name], list[float]]) -> float:
    """Seconds of the last steps and the fastest baseline, rested and in a chain."""
    at_case = {name: found[0] for (each, name), found in known.items() if each == case and found}
    lasts = [Name(backend, step.name) for backend in BACKENDS if (step := op.last_step(backend, case))]
    ours = [at_case[name] for name in lasts if name in at_case]
    if not ours:
        return 0.0
    best = min(time for name, time in at_case.items() if name.backend in op.baselines)
    rests_ms = sum(max(REST_MS, REST * _sample_ms(op, case, time)) for time in (best, *ours))
    replays_s = sum(_rounds_s(op, case, time) for time in (best, *ours)) * CONDITION_ROUNDS / ROUNDS
    return 2 * replays_s + CONDITION_ROUNDS * rests_ms / 1e3 + CHAIN_S


def missed(ops: Iterable[Op], folder: Path) -> str:
    """What a run without them lacks that is recorded of these operations, with the remedy; empty where nothing is."""
    tables = (store.read_table(folder, op.name, "timings") for op in ops)
    timed = {backend for table in tables for backend in table["backend"][table["status"] == "ok"]}
    here = libraries.versions()
    absent = [each for name, each in libraries.LIBRARIES.items() if name in timed and not here[name]]
    if not absent:
        return ""
    return (
        f"{' and '.join(each.title for each in absent)} not installed here: what is recorded has times of their "
        f"kernels, and this run will have none; `pip install {' '.join(each.package for each in absent)}` first"
    )

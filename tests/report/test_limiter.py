"""The limiter at its borders, and what it says where a counter is missing."""

from __future__ import annotations

import pytest

from kernel_twins.harness.ceilings import Ceilings, load
from kernel_twins.report.meaning.limiter import Limit, limiter
from kernel_twins.report.rows import store
from kernel_twins.report.rows.metrics import DURATION, fold, stall_metric

# With a duration of 100 ns, a sector is 0.32 GB/s and a wavefront 1.28 GB/s: 1 % of these ceilings.
CEILINGS = Ceilings(
    "h100-sxm", 3_000, 3_000, 3_000, l2_read=32, shared_read=128, fp32=60, bf16=700, multiprocessors=132
)
COUNTER = {
    "device memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "FMA pipe": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "special functions": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "L2": "lts__t_sectors_srcunit_tex.sum",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
}
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
STALLS = {stall_metric("long_scoreboard"): 9.1, stall_metric("barrier"): 2.0, stall_metric("not_selected"): 50.0}


def counters(conflicts: float = 0.0, blocks: float = 1_000, **shares: float) -> dict[str, float]:
    """A call's counters, all units at 5 % but for those given (blanks written as ``_``)."""
    busy = dict.fromkeys(COUNTER, 5.0) | {unit.replace("_", " "): share for unit, share in shares.items()}
    folded = {COUNTER[unit]: share for unit, share in busy.items()} | STALLS
    return folded | {DURATION: 100.0, "launch__grid_size": blocks, CONFLICTS: conflicts * busy["shared memory"] / 100}


def limit(folded: dict[str, float], time_us: float | None = 100.0, ceilings: Ceilings | None = CEILINGS) -> Limit:
    found = limiter(folded, time_us=time_us, ceilings=ceilings, floor_us=None)
    assert found is not None
    return found


@pytest.mark.parametrize("unit", COUNTER)
def test_a_unit_is_the_limit_from_80_percent_on(unit: str) -> None:
    at = limit(counters(**{unit.replace(" ", "_"): 80.0}))
    assert at.kind == unit and at.share == pytest.approx(80)
    assert at.told().startswith(f"{unit}, 80 % busy (next: ")
    assert limit(counters(**{unit.replace(" ", "_"): 79.9})).kind == "latency"


def test_two_within_ten_points_are_balanced_unless_both_are_low() -> None:
    assert limit(counters(FMA_pipe=85.0, issue_slots=94.9)).kind == "balanced"
    assert limit(counters(FMA_pipe=85.0, issue_slots=95.0)).kind == "issue slots"
    assert limit(counters(FMA_pipe=60.0, L2=69.9)).kind == "balanced"
    assert limit(counters(FMA_pipe=59.9, L2=60.0)).kind == "latency"
    balanced = limit(counters(FMA_pipe=70.0, L2=65.0))
    assert balanced.told() == "FMA pipe 70 % and L2 65 %, balanced"
    assert balanced.share == 70.0


def test_conflicts_count_from_a_fifth_of_the_wavefronts_on() -> None:
    at = limit(counters(conflicts=20.0, shared_memory=60.0))
    assert at.kind == "bank conflicts" and at.share == pytest.approx(20)
    assert limit(counters(conflicts=19.9, shared_memory=60.0)).kind == "latency"
    assert limit(counters(conflicts=50.0, shared_memory=95.0)).kind == "bank conflicts"
    assert limit(counters(conflicts=19.9, shared_memory=95.0)).kind == "shared memory"


def test_conflicts_do_not_count_where_shared_memory_idles_or_something_else_is_full() -> None:
    assert limit(counters(conflicts=90.0, shared_memory=11.0)).kind == "latency"
    assert limit(counters(conflicts=90.0, shared_memory=70.0, device_memory=90.0)).kind == "device memory"


def test_latency_names_the_top_stall_and_never_a_warp_that_was_ready() -> None:
    found = limit(counters(device_memory=40.0, L2=30.0))
    assert found.kind == "latency"
    assert found.stall == ("long_scoreboard", 9.1)
    assert found.told() == "latency: long_scoreboard 9.1 cycles an issue (busiest: device memory 40 %, then L2 30 %)"
    without = {name: value for name, value in counters().items() if name not in STALLS}
    assert limit(without).stall is None
    assert "stalls not measured" in limit(without).told()


@pytest.mark.parametrize("gone", [*COUNTER.values(), CONFLICTS])
def test_what_is_not_measured_is_never_ruled_out(gone: str) -> None:
    """Without one of the counters, the unit that it tells of could be the limit."""
    idle = {name: value for name, value in counters().items() if name != gone}
    assert limit(idle).kind == "undecided"
    close = {name: value for name, value in counters(device_memory=85.0, L2=82.0).items() if name != gone}
    expected = {COUNTER["device memory"]: "L2", COUNTER["L2"]: "device memory"}.get(gone, "device memory")
    assert limit(close).kind == expected
    conflicted = {name: v for name, v in counters(conflicts=50, shared_memory=70).items() if name != gone}
    assert limit(conflicted).kind == "undecided"


def test_without_a_survey_the_cache_levels_are_unknown() -> None:
    found = limit(counters(L2=99.0), ceilings=None)
    assert found.kind == "undecided"
    assert found.missing == ("L2", "shared memory")
    assert limit(counters(tensor_pipe=88.0, L2=99.0), ceilings=None).kind == "tensor pipe"


def test_a_grid_that_leaves_multiprocessors_empty_is_limited_by_its_launch() -> None:
    assert limit(counters(blocks=131, device_memory=79.0)).kind == "launch"
    assert limit(counters(blocks=132, device_memory=95.0)).kind == "device memory"
    # A persistent grid may leave some empty on purpose; an FMA pipe's share is that of the SMs at work.
    assert limit(counters(blocks=128, tensor_pipe=90.0)).kind == "tensor pipe"
    assert limit(counters(blocks=128, FMA_pipe=90.0)).kind == "launch"
    assert limit(counters(blocks=131)).told() == "launch: 131 blocks for 132 multiprocessors"
    # The lowest tier knows the grid, and nothing else that a verdict could rest on.
    assert limit({"launch__grid_size": 1.0}).kind == "launch"
    assert limiter({"launch__grid_size": 132.0}, time_us=100.0, ceilings=CEILINGS, floor_us=None) is None


def test_a_call_of_a_few_microseconds_is_limited_by_its_launch() -> None:
    assert limit(counters(device_memory=95.0), time_us=4.9).kind == "launch"
    assert limit(counters(device_memory=95.0), time_us=5.0).kind == "device memory"
    assert limit(counters(device_memory=95.0), time_us=None).kind == "device memory"


def test_the_share_of_the_floor_is_told() -> None:
    found = limiter(counters(device_memory=91.0), time_us=99.1, ceilings=CEILINGS, floor_us=89.0)
    assert found is not None
    assert found.share_of_floor == pytest.approx(100 * 89.0 / 99.1)
    assert found.told().endswith("; 90 % of what the floor of 89 µs allows")
    assert found.shares["device memory"] == 91.0


def test_no_counters_no_claim() -> None:
    assert limiter({}, time_us=100.0, ceilings=CEILINGS, floor_us=None) is None


def test_recorded_calls_are_limited_by_what_is_known_of_them() -> None:
    """On what the H100 recorded: vector add by memory, cuBLAS on tensor cores, the unpadded tile by its conflicts."""
    expected = {
        ("vector_add", "torch", ""): "device memory",
        ("vector_add", "cuda", "v06_bulk_tile"): "device memory",
        ("matmul_bf16", "torch", ""): "tensor pipe",
        ("matmul_bf16", "cuda", "v01_naive"): "latency",
        ("matmul_bf16", "cuda", "v02_tensor_cores"): "bank conflicts",
    }
    for (op, backend, step), kind in expected.items():
        table = store.read_table(store.DATA / store.REFERENCE_GPU, op, "counters")
        rows = table[(table["backend"] == backend) & (table["step"] == step)]
        wide = rows.assign(value=rows["value"].astype(float)).pivot(index="launch", columns="metric", values="value")
        folded = fold(wide.to_dict("records"))
        # Special functions were not recorded at first; none of these kernels has any to speak of.
        folded.setdefault(COUNTER["special functions"], 0.0)
        assert limit(folded, ceilings=load(store.REFERENCE_GPU)).kind == kind, (op, backend, step)

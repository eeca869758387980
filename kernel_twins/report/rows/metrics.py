"""The registry of counters: what ncu is asked for, in which unit it answers, and how a call's launches add up.

Names resolve on GH100; several obvious ones mislead there. Tensor work is counted by ``sm__ops_path``, because one
wgmma is a single instruction for 131,072 FLOP a warp; load and store sectors do not see TMA traffic. ``sm__throughput``
and its like are left out: one of them alone costs eight passes, and the limiter is derived from its components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

KernelClass = Literal["memory", "arithmetic"]
Better = Literal["lower", "higher", "context"]
Fold = Literal["sum", "max", "weighted"]
Tier = Literal["T0", "T1", "T2", "T3"]

TIERS: tuple[Tier, ...] = ("T0", "T1", "T2", "T3")
PASSES: Mapping[Tier, int] = {"T0": 1, "T1": 6, "T2": 9, "T3": 12}
"""Replays of a kernel that ncu 2025.3 takes for a tier on an H100, lower tiers included."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One counter of ncu's.

    ``unit`` is ncu's base unit, as NVIDIA's reader spells it (empty for a plain number). ``fold`` says how the launches
    of one call add up: counts are summed, sizes take the largest; a share or a rate is recomputed from ``ratio_of``
    (numerator, denominator), where both are recorded, and weighted by cycles where they are not. ``better`` holds for
    the ``classes`` of kernels that the operation's ceiling puts it in, and is context for the others.
    """

    name: str
    unit: str
    meaning: str
    fold: Fold
    tier: Tier
    better: Better = "context"
    classes: tuple[KernelClass, ...] = ("memory", "arithmetic")
    ratio_of: tuple[str, str] | None = None

    @property
    def is_share(self) -> bool:
        """Whether it is a percentage of something, and so can never be far above 100."""
        return self.unit == "%"

    def better_for(self, kernel_class: KernelClass) -> Better:
        return self.better if kernel_class in self.classes else "context"


STALLS: Mapping[str, str] = {
    "barrier": "other warps of the block at __syncthreads",
    "branch_resolving": "a branch's target",
    "dispatch_stall": "the dispatcher, which holds back an issued instruction",
    "drain": "stores to leave the SM before the warp may end",
    "gmma": "an asynchronous wgmma or its registers",
    "imc_miss": "a constant that is not in the immediate-constant cache",
    "lg_throttle": "room in the queue for local and global accesses",
    "long_scoreboard": "data from L2 or device memory",
    "math_pipe_throttle": "an arithmetic pipe that is busy",
    "membar": "a memory fence",
    "mio_throttle": "room in the queue for shared memory and special functions",
    "misc": "something that ncu does not name",
    "no_instruction": "the next instruction, not in the instruction cache",
    "not_selected": "nothing: it was ready, another warp was picked",
    "selected": "nothing: it issued",
    "short_scoreboard": "data from shared memory or a special function",
    "sleeping": "the end of a nanosleep",
    "tex_throttle": "room in the texture queue",
    "wait": "a fixed latency of the instruction before",
}
"""Why a warp did not issue, and what it waited for."""

DURATION = "gpu__time_duration.sum"
CYCLES = "sm__cycles_elapsed.max"
_GLOBAL_LD, _GLOBAL_ST = "pipe_lsu_mem_global_op_ld.sum", "pipe_lsu_mem_global_op_st.sum"
_L2_HITS, _L2_SECTORS = "lts__t_sectors_lookup_hit.sum", "lts__t_sectors.sum"


def stall_metric(stall: str) -> str:
    return f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio"


def _tensor(path: str, what: str) -> Metric:
    return Metric(f"sm__ops_path_tensor_{path}.sum", "", f"FLOP of {what}, dense", "sum", "T3")


_ALL = (
    Metric(DURATION, "ns", "time of the kernel under ncu, never the time of record", "sum", "T0", "lower"),
    Metric(CYCLES, "cycle", "cycles of the SM that ran longest", "sum", "T0", "lower"),
    Metric("gpc__cycles_elapsed.avg.per_second", "hz", "clock of the SMs", "weighted", "T0"),
    Metric("dram__bytes_read.sum", "byte", "bytes read from device memory", "sum", "T0", "lower"),
    Metric("dram__bytes_write.sum", "byte", "bytes written to device memory", "sum", "T0", "lower"),
    Metric("launch__registers_per_thread", "register/thread", "registers of a thread", "max", "T0"),
    Metric("launch__shared_mem_per_block_static", "byte/block", "static shared memory of a block", "max", "T0"),
    Metric("launch__shared_mem_per_block_dynamic", "byte/block", "dynamic shared memory of a block", "max", "T0"),
    Metric("launch__grid_size", "", "blocks of the grid", "max", "T0"),
    Metric("launch__block_size", "", "threads of a block", "max", "T0"),
    Metric("launch__waves_per_multiprocessor", "", "blocks over those that fit the GPU at once", "max", "T0"),
    Metric("launch__occupancy_limit_registers", "block", "blocks an SM holds by registers", "max", "T0"),
    Metric("launch__occupancy_limit_shared_mem", "block", "blocks an SM holds by shared memory", "max", "T0"),
    Metric("launch__occupancy_limit_warps", "block", "blocks an SM holds by warps", "max", "T0"),
    Metric("launch__occupancy_limit_blocks", "block", "blocks an SM holds at most", "max", "T0"),
    Metric(
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "%", "device memory's busiest part", "weighted", "T1", "higher", ("memory",),
    ),
    Metric(_L2_HITS, "sector", "sectors found in L2", "sum", "T1"),
    Metric(_L2_SECTORS, "sector", "sectors that L2 looked up for anybody, 32 bytes each", "sum", "T1", "lower"),
    Metric("lts__t_sectors_srcunit_tex.sum", "sector", "sectors that L2 looked up for the SMs", "sum", "T1", "lower"),
    Metric(
        "lts__t_sector_hit_rate.pct", "%", "sectors found in L2", "weighted", "T1", ratio_of=(_L2_HITS, _L2_SECTORS)
    ),
    Metric("sm__warps_active.avg.pct_of_peak_sustained_active", "%", "warps resident, achieved", "weighted", "T1"),
    Metric("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", "cycles that issued", "weighted", "T1"),
    Metric("smsp__warps_eligible.avg.per_cycle_active", "warp", "warps ready to issue", "weighted", "T1"),
    Metric("smsp__inst_executed.sum", "inst", "instructions of warps", "sum", "T1", "lower"),
    Metric(
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "%", "tensor pipe busy", "weighted", "T1", "higher", ("arithmetic",),
    ),
    Metric("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active", "%", "FMA pipe busy", "weighted", "T1"),
    Metric("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", "%", "special functions", "weighted", "T1"),
    Metric("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "", "wavefronts of shared memory", "sum", "T1", "lower"),
    Metric("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "", "wavefronts lost to banks", "sum", "T1", "lower"),
    Metric(f"l1tex__t_sectors_{_GLOBAL_LD}", "sector", "sectors loaded", "sum", "T1"),
    Metric(f"l1tex__t_requests_{_GLOBAL_LD}", "", "load instructions of warps", "sum", "T1"),
    Metric(f"l1tex__t_sectors_{_GLOBAL_ST}", "sector", "sectors stored", "sum", "T1"),
    Metric(f"l1tex__t_requests_{_GLOBAL_ST}", "", "store instructions of warps", "sum", "T1"),
    Metric("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", "byte", "spilled registers read", "sum", "T1", "lower"),
    Metric("l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum", "byte", "spilled registers written", "sum", "T1", "lower"),
    *(
        Metric(stall_metric(stall), "inst", f"warps waiting for {what}, an issue", "weighted", "T2")
        for stall, what in STALLS.items()
    ),
    _tensor("op_hgmma_src_bf16_dst_fp32_sparsity_off", "wgmma on bf16"),
    _tensor("op_hgmma_src_fp16_sparsity_off", "wgmma on fp16"),
    _tensor("op_hgmma_src_tf32_dst_fp32_sparsity_off", "wgmma on TF32"),
    _tensor("op_hmma_src_bf16_dst_fp32_sparsity_off", "mma.sync on bf16"),
    _tensor("op_hmma_src_fp16_dst_fp32_sparsity_off", "mma.sync on fp16"),
    _tensor("op_hmma_src_tf32_dst_fp32_sparsity_off", "mma.sync on TF32"),
    _tensor("src_fp8_sparsity_off", "tensor cores on fp8"),
    Metric("smsp__sass_thread_inst_executed_op_fadd_pred_on.sum", "inst", "fp32 additions of threads", "sum", "T3"),
    Metric("smsp__sass_thread_inst_executed_op_fmul_pred_on.sum", "inst", "fp32 products of threads", "sum", "T3"),
    Metric("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", "inst", "fp32 FMAs of threads", "sum", "T3"),
    Metric("sm__inst_executed_pipe_tensor_op_gmma.sum", "inst", "wgmma instructions of warps", "sum", "T3"),
    Metric("l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum", "byte", "bytes fetched by TMA", "sum", "T3"),
)  # fmt: skip

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


def meaning(metric: str) -> str:
    """What a metric counts; empty where the registry does not know it."""
    return METRICS[metric].meaning if metric in METRICS else ""


def names(tier: Tier) -> list[str]:
    """What a tier asks for; every tier holds those below it."""
    return [metric.name for metric in METRICS.values() if metric.tier <= tier]


def fold(launches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One call's metrics from those of its launches; a metric that a launch lacks is left out."""
    if not launches:
        return {}
    cycles = sum(launch[CYCLES] for launch in launches)
    folded = {}
    for name, metric in METRICS.items():
        if any(name not in launch for launch in launches):
            continue
        values = [launch[name] for launch in launches]
        if metric.fold == "weighted":
            folded[name] = sum(v * launch[CYCLES] for v, launch in zip(values, launches, strict=True)) / cycles
        else:
            folded[name] = sum(values) if metric.fold == "sum" else max(values)
    for name, metric in METRICS.items():
        if name in folded and metric.ratio_of:
            above, below = (folded.get(each) for each in metric.ratio_of)
            if above is not None and below:
                folded[name] = (100 if metric.is_share else 1) * above / below
    return folded


def top_stalls(counters: Mapping[str, float], count: int = 2) -> list[tuple[str, float]]:
    """The reasons for which warps waited most, in cycles per issued instruction; issuing itself is no stall."""
    waits = [
        (stall, counters[stall_metric(stall)])
        for stall in STALLS
        if stall not in ("selected", "not_selected") and stall_metric(stall) in counters
    ]
    return sorted(waits, key=lambda wait: -wait[1])[:count]

"""What ncu is asked for, and the quantities that the log speaks of.

Names resolve on GH100; several obvious ones mislead there. Tensor work is counted by ``sm__ops_path``, because one
wgmma is a single instruction for 131,072 FLOP a warp; load and store sectors do not see TMA traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip

DURATION = "gpu__time_duration.sum"

# How a metric adds up over the launches of one call: counts add, shares are weighted by duration, sizes take the max.
Fold = Literal["sum", "weighted", "max"]

METRICS: dict[str, Fold] = {
    DURATION: "sum",
    "sm__cycles_elapsed.max": "sum",
    "gpc__cycles_elapsed.avg.per_second": "weighted",
    "dram__bytes_read.sum": "sum",
    "dram__bytes_write.sum": "sum",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "weighted",
    "lts__t_sectors_lookup_hit.sum": "sum",
    "lts__t_sectors.sum": "sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "weighted",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "weighted",
    "smsp__inst_executed.sum": "sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "weighted",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active": "weighted",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": "sum",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": "sum",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": "sum",
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum": "sum",
    "sm__ops_path_tensor_op_hgmma_src_bf16_dst_fp32_sparsity_off.sum": "sum",
    "sm__ops_path_tensor_op_hmma_src_bf16_dst_fp32_sparsity_off.sum": "sum",
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": "sum",
    "launch__registers_per_thread": "max",
    "launch__shared_mem_per_block_static": "max",
    "launch__shared_mem_per_block_dynamic": "max",
    "launch__grid_size": "max",
    "launch__block_size": "max",
    **{f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio": "weighted" for stall in STALLS},
}


def fold(launches: list[Mapping[str, float]]) -> dict[str, float]:
    """One call's metrics from those of its launches; a metric that a launch lacks is left out."""
    if not launches:
        return {}
    total = sum(launch[DURATION] for launch in launches)
    folded = {}
    for metric, how in METRICS.items():
        if any(metric not in launch for launch in launches):
            continue
        values = [launch[metric] for launch in launches]
        if how == "weighted":
            folded[metric] = sum(v * launch[DURATION] for v, launch in zip(values, launches, strict=True)) / total
        else:
            folded[metric] = sum(values) if how == "sum" else max(values)
    return folded


def top_stalls(counters: Mapping[str, float], count: int = 2) -> list[tuple[str, float]]:
    """The reasons for which warps waited most, in cycles per issued instruction; issuing itself is no stall."""
    waits = [
        (stall, counters.get(f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio", 0.0))
        for stall in STALLS
        if stall not in ("selected", "not_selected")
    ]
    return sorted(waits, key=lambda wait: -wait[1])[:count]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with a name: how it is computed from a call's counters, and how it is written."""

    title: str
    unit: str
    compute: Callable[[Mapping[str, float]], float | None] = lambda counters: None

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


def _metric(name: str, scale: float = 1.0) -> Callable[[Mapping[str, float]], float | None]:
    return lambda counters: counters[name] * scale if name in counters else None


def _total(*names: str, scale: float = 1.0) -> Callable[[Mapping[str, float]], float | None]:
    return lambda counters: (
        scale * sum(counters[name] for name in names) if all(name in counters for name in names) else None
    )


def _ratio(above: str, below: str, scale: float = 1.0) -> Callable[[Mapping[str, float]], float | None]:
    def compute(counters: Mapping[str, float]) -> float | None:
        return scale * counters[above] / counters[below] if above in counters and counters.get(below) else None

    return compute


_LD, _ST = "pipe_lsu_mem_global_op_ld.sum", "pipe_lsu_mem_global_op_st.sum"

# What the counters alone give, and, without a ``compute``, what analysis.py adds from the operation and the bench's
# time. ncu's own duration is never the time of a step.
QUANTITIES: dict[str, Quantity] = {
    "time": Quantity("time", "µs"),
    "rate": Quantity("rate", ""),
    "ceiling_share": Quantity("share of the measured ceiling", "%"),
    "bytes_over_minimum": Quantity("DRAM bytes over the minimum", ""),
    "error_over_torch": Quantity("error over PyTorch's", ""),
    "dram_bytes": Quantity("DRAM bytes", "MB", _total("dram__bytes_read.sum", "dram__bytes_write.sum", scale=1e-6)),
    "dram_share": Quantity("DRAM busy", "%", _metric("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed")),
    "l2_hit": Quantity("L2 hit", "%", _ratio("lts__t_sectors_lookup_hit.sum", "lts__t_sectors.sum", 100)),
    "tensor_pipe": Quantity(
        "tensor pipe", "%", _metric("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed")
    ),
    "fma_pipe": Quantity("FMA pipe", "%", _metric("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active")),
    "issue_active": Quantity("issue slots", "%", _metric("smsp__issue_active.avg.pct_of_peak_sustained_active")),
    "occupancy": Quantity("occupancy", "%", _metric("sm__warps_active.avg.pct_of_peak_sustained_active")),
    "instructions": Quantity("instructions", "M", _metric("smsp__inst_executed.sum", 1e-6)),
    "load_requests": Quantity("load requests", "M", _metric(f"l1tex__t_requests_{_LD}", 1e-6)),
    "sectors_per_load": Quantity("sectors per load", "", _ratio(f"l1tex__t_sectors_{_LD}", f"l1tex__t_requests_{_LD}")),
    "sectors_per_store": Quantity(
        "sectors per store", "", _ratio(f"l1tex__t_sectors_{_ST}", f"l1tex__t_requests_{_ST}")
    ),
    "bank_conflicts": Quantity(
        "bank conflicts",
        "%",
        _ratio(
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", 100
        ),
    ),
    "registers": Quantity("registers", "", _metric("launch__registers_per_thread")),
    "shared_memory": Quantity(
        "shared memory",
        "KiB",
        _total("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic", scale=1 / 1024),
    ),
    "spills": Quantity(
        "spills", "B", _total(*(f"l1tex__t_bytes_pipe_lsu_mem_local_op_{way}.sum" for way in ("ld", "st")))
    ),
}

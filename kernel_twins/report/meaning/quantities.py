"""The numbers that the log and the predictions speak of, each computed from a call's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernel_twins.report.rows.metrics import stall_metric


@dataclass(frozen=True, slots=True)
class Sum:
    """Counters added up; None where one is missing."""

    names: tuple[str, ...]
    scale: float = 1.0

    def of(self, counters: Mapping[str, float]) -> float | None:
        if any(name not in counters for name in self.names):
            return None
        return self.scale * sum(counters[name] for name in self.names)


@dataclass(frozen=True, slots=True)
class Quotient:
    """A counter over another; None where one is missing, or nothing is below."""

    above: str
    below: str
    scale: float = 1.0

    def of(self, counters: Mapping[str, float]) -> float | None:
        if self.above not in counters or not counters.get(self.below):
            return None
        return self.scale * counters[self.above] / counters[self.below]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with a name: its formula over a call's counters, as data, and how it is written."""

    title: str
    unit: str
    formula: Sum | Quotient | None = None

    def compute(self, counters: Mapping[str, float]) -> float | None:
        return self.formula.of(counters) if self.formula else None

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


def _sum(*names: str, scale: float = 1.0) -> Sum:
    return Sum(names, scale)


_LD, _ST = "pipe_lsu_mem_global_op_ld.sum", "pipe_lsu_mem_global_op_st.sum"

# What the counters alone give, and, without a ``formula``, what analysis.py adds from the operation and the bench's
# time. ncu's own duration is never the time of a step.
QUANTITIES: dict[str, Quantity] = {
    "time": Quantity("time", "µs"),
    "rate": Quantity("rate", ""),
    "ceiling_share": Quantity("share of the measured ceiling", "%"),
    "bytes_over_minimum": Quantity("DRAM bytes over the minimum", ""),
    "error_over_torch": Quantity("error over PyTorch's", ""),
    "dram_bytes": Quantity("DRAM bytes", "MB", _sum("dram__bytes_read.sum", "dram__bytes_write.sum", scale=1e-6)),
    "dram_share": Quantity("DRAM busy", "%", _sum("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed")),
    "l2_bytes": Quantity("bytes between L2 and the SMs", "MB", _sum("lts__t_sectors_srcunit_tex.sum", scale=32e-6)),
    "l2_hit": Quantity("L2 hit", "%", _sum("lts__t_sector_hit_rate.pct")),
    "tensor_pipe": Quantity(
        "tensor pipe", "%", _sum("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed")
    ),
    "fma_pipe": Quantity("FMA pipe", "%", _sum("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active")),
    "issue_active": Quantity("issue slots", "%", _sum("smsp__issue_active.avg.pct_of_peak_sustained_active")),
    "instruction_stalls": Quantity("waits for instructions", "cycles an issue", _sum(stall_metric("no_instruction"))),
    "occupancy": Quantity("occupancy", "%", _sum("sm__warps_active.avg.pct_of_peak_sustained_active")),
    "instructions": Quantity("instructions", "M", _sum("smsp__inst_executed.sum", scale=1e-6)),
    "load_requests": Quantity("load requests", "M", _sum(f"l1tex__t_requests_{_LD}", scale=1e-6)),
    "sectors_per_load": Quantity(
        "sectors per load", "", Quotient(f"l1tex__t_sectors_{_LD}", f"l1tex__t_requests_{_LD}")
    ),
    "sectors_per_store": Quantity(
        "sectors per store", "", Quotient(f"l1tex__t_sectors_{_ST}", f"l1tex__t_requests_{_ST}")
    ),
    "bank_conflicts": Quantity(
        "bank conflicts",
        "%",
        Quotient(
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", 100
        ),
    ),
    "registers": Quantity("registers", "", _sum("launch__registers_per_thread")),
    "shared_memory": Quantity(
        "shared memory",
        "KiB",
        _sum("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic", scale=1 / 1024),
    ),
    "spills": Quantity(
        "spills", "B", _sum(*(f"l1tex__t_bytes_pipe_lsu_mem_local_op_{way}.sum" for way in ("ld", "st")))
    ),
}

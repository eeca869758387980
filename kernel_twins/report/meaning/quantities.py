"""The numbers that the log and the predictions speak of, each computed from a call's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernel_twins.report.rows.metrics import stall_metric


@dataclass(frozen=True, slots=True)
class Formula:
    """A sum of counters, times a scale; over one counter, where ``below`` names it."""

    above: tuple[str, ...] = ()
    below: str = ""
    scale: float = 1.0

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*self.above, self.below) if self.below else self.above

    def __call__(self, counters: Mapping[str, float]) -> float | None:
        """None where a counter is missing, or the one below is 0."""
        if not self.above or any(name not in counters for name in self.metrics):
            return None
        total = self.scale * sum(counters[name] for name in self.above)
        if not self.below:
            return total
        return total / counters[self.below] if counters[self.below] else None


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with a name: what it says, how it is computed from a call's counters, and how it is written."""

    title: str
    unit: str
    meaning: str
    compute: Formula = Formula()

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


def _sum(*names: str, scale: float = 1.0) -> Formula:
    return Formula(names, scale=scale)


def _ratio(above: str, below: str, scale: float = 1.0) -> Formula:
    return Formula((above,), below, scale)


_LD, _ST = "pipe_lsu_mem_global_op_ld.sum", "pipe_lsu_mem_global_op_st.sum"

# What the counters alone give, and, without a formula, what analysis.py adds from the operation and the bench's time.
# ncu's own duration is never the time of a step.
QUANTITIES: dict[str, Quantity] = {
    "time": Quantity("time", "µs", "The median time of a call in the bench, over its rounds."),
    "rate": Quantity("rate", "", "The operation's minimum bytes, or its arithmetic, over the time."),
    "ceiling_share": Quantity(
        "share of the measured ceiling", "%", "The rate as a share of the one that the hardware survey measured."
    ),
    "bytes_over_minimum": Quantity(
        "DRAM bytes over the minimum",
        "",
        "How often each byte that the operation must move goes through device memory: 1 is the least.",
    ),
    "error_over_torch": Quantity(
        "error over PyTorch's", "", "The largest absolute error against float64, over that of PyTorch's own call."
    ),
    "dram_bytes": Quantity(
        "DRAM bytes",
        "MB",
        "The bytes that device memory reads and writes.",
        _sum("dram__bytes_read.sum", "dram__bytes_write.sum", scale=1e-6),
    ),
    "dram_share": Quantity(
        "DRAM busy",
        "%",
        "In how many of its cycles device memory transfers data.",
        _sum("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    ),
    "l2_bytes": Quantity(
        "bytes between L2 and the SMs",
        "MB",
        "What the SMs asked of L2, in sectors of 32 bytes.",
        _sum("lts__t_sectors_srcunit_tex.sum", scale=32e-6),
    ),
    "l2_hit": Quantity(
        "L2 hit", "%", "How many of the sectors asked for L2 already held.", _sum("lts__t_sector_hit_rate.pct")
    ),
    "tensor_pipe": Quantity(
        "tensor pipe",
        "%",
        "In how many of their cycles the tensor cores multiply.",
        _sum("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"),
    ),
    "fma_pipe": Quantity(
        "FMA pipe",
        "%",
        "In how many of its cycles the fp32 pipe works.",
        _sum("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active"),
    ),
    "issue_active": Quantity(
        "issue slots",
        "%",
        "In how many cycles a scheduler issued an instruction.",
        _sum("smsp__issue_active.avg.pct_of_peak_sustained_active"),
    ),
    "instruction_stalls": Quantity(
        "waits for instructions",
        "cycles an issue",
        "How long warps waited for an instruction that was not in the instruction cache.",
        _sum(stall_metric("no_instruction")),
    ),
    "occupancy": Quantity(
        "occupancy",
        "%",
        "How many of the warps that an SM can hold are resident.",
        _sum("sm__warps_active.avg.pct_of_peak_sustained_active"),
    ),
    "instructions": Quantity(
        "instructions", "M", "Instructions that warps executed.", _sum("smsp__inst_executed.sum", scale=1e-6)
    ),
    "load_requests": Quantity(
        "load requests",
        "M",
        "Load instructions of warps to global memory.",
        _sum(f"l1tex__t_requests_{_LD}", scale=1e-6),
    ),
    "sectors_per_load": Quantity(
        "sectors per load",
        "",
        "How many sectors of 32 bytes one load of a warp touches: 4 for coalesced 4-byte accesses, 32 at worst.",
        _ratio(f"l1tex__t_sectors_{_LD}", f"l1tex__t_requests_{_LD}"),
    ),
    "sectors_per_store": Quantity(
        "sectors per store",
        "",
        "How many sectors of 32 bytes one store of a warp touches: 4 for coalesced 4-byte accesses, 32 at worst.",
        _ratio(f"l1tex__t_sectors_{_ST}", f"l1tex__t_requests_{_ST}"),
    ),
    "bank_conflicts": Quantity(
        "bank conflicts",
        "%",
        "Which share of shared memory's wavefronts only repeats an access for a busy bank.",
        _ratio(
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", 100
        ),
    ),
    "registers": Quantity("registers", "", "Registers of a thread, as launched.", _sum("launch__registers_per_thread")),
    "shared_memory": Quantity(
        "shared memory",
        "KiB",
        "Shared memory of a block, static and dynamic.",
        _sum("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic", scale=1 / 1024),
    ),
    "spills": Quantity(
        "spills",
        "B",
        "Bytes of registers that went to local memory and came back.",
        _sum(*(f"l1tex__t_bytes_pipe_lsu_mem_local_op_{way}.sum" for way in ("ld", "st"))),
    ),
}

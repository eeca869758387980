"""What holds a call back, computed from its counters: the busy unit, bank conflicts, latency, or the launch itself.

The cut-offs of 80 % (saturated) and 60 % (low) are those of Nsight Compute's own rules. Perfect kernels do not reach
100 %: on the H100, device memory ends at 91 to 93 % and the tensor pipe at about 90 %.

Nothing is claimed of a counter that is not there. A unit at 80 % is the limit whatever the others say, but "balanced",
"bank conflicts" and "latency" say something of all units, and need them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kernel_twins.harness.ceilings import Ceilings
from kernel_twins.report.rows.metrics import DURATION, top_stalls

Unit = Literal["device memory", "L2", "shared memory", "tensor pipe", "FMA pipe", "special functions", "issue slots"]
Kind = Unit | Literal["launch", "bank conflicts", "latency", "balanced", "undecided"]

SATURATED = 80.0  # percent
LOW = 60.0  # percent: below it a unit is no limit
BALANCED = 10.0  # points between the two busiest
CONFLICTED = 20.0  # percent of shared memory's wavefronts that only a bank conflict made necessary
LOST = 10.0  # percent of the time that those wavefronts must take: where shared memory idles, they cost nothing
_AT_FLOOR = 99.5  # percent
LAUNCH_US = 5.0
"""Below this a call's time is mostly that of a launch, of which the shortest takes about 4 µs on an H100."""

_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"  # 128 bytes each
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
_SECTORS = "lts__t_sectors_srcunit_tex.sum"  # 32 bytes each; those of device memory's own traffic not among them
_GRID = "launch__grid_size"
# Those whose share is of what all SMs together could do.
_OF_ALL: tuple[Unit, ...] = ("device memory", "L2", "shared memory", "tensor pipe")

# Units that ncu gives a share of. L2 and shared memory come from their bytes and the survey, as one counter of ncu's
# own for either costs eight passes.
_BUSY: Mapping[Unit, str] = {
    "device memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "FMA pipe": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "special functions": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
_UNITS: tuple[Unit, ...] = (*_BUSY, "L2", "shared memory")

COUNTERS: Mapping[Kind, tuple[str, ...]] = {
    **{unit: (metric,) for unit, metric in _BUSY.items()},
    "L2": (_SECTORS, DURATION),
    "shared memory": (_WAVEFRONTS, DURATION),
    "bank conflicts": (_CONFLICTS, _WAVEFRONTS),
    "launch": (_GRID, DURATION),
}
"""What a verdict on each is read from."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What holds a call back, and the numbers that say so.

    ``share`` is what the kind is told by, in percent: how busy the unit is (the busier one where two are balanced), or
    which part of the wavefronts are conflicts; None for launch, latency and undecided. ``shares`` are those of all
    units that were measured, in percent, the busiest first. ``stall`` is the reason for which warps waited most, in
    cycles an issue. ``launch`` says why the launch is the limit. ``share_of_floor`` is the floor over the time, in
    percent.
    """

    kind: Kind
    share: float | None
    shares: Mapping[Unit, float]
    stall: tuple[str, float] | None
    launch: str
    missing: tuple[Kind, ...] = ()
    floor_us: float | None = None
    share_of_floor: float | None = None

    def told(self) -> str:
        """One sentence, without its full stop, such as ``device memory, 91 % busy (next: L2, 55 %)``."""
        floor = ""
        if self.floor_us is not None and self.share_of_floor is not None:
            # The survey's rate is the best of its own probes; a step may come out a little above it.
            reached = f"{self.share_of_floor:.0f} % of what" if self.share_of_floor < _AT_FLOOR else "all that"
            floor = f"; {reached} the floor of {self.floor_us:,.4g} µs allows"
        return self._told() + floor

    def short(self) -> str:
        """The kind and the number that it is told by, such as ``device memory 91 %``, for a cell of a table."""
        if self.kind == "latency" and self.stall:
            return f"{self.stall[0]} {self.stall[1]:.1f}"
        if self.kind == "balanced":
            return " = ".join(list(self.shares)[:2])
        return self.kind if self.share is None else f"{self.kind} {self.share:.0f} %"

    def _told(self) -> str:
        busiest, second, *_ = [*(f"{unit} {share:.0f} %" for unit, share in self.shares.items()), "", ""]
        match self.kind:
            case "launch":
                return f"launch: {self.launch}"
            case "undecided":
                return f"undecided: {', '.join(self.missing)} not measured (busiest known: {busiest})"
            case "latency":
                stall = f"{self.stall[0]} {self.stall[1]:.1f} cycles an issue" if self.stall else "stalls not measured"
                return f"latency: {stall} (busiest: {busiest}, then {second})"
            case "balanced":
                return f"{busiest} and {second}, balanced"
            case "bank conflicts":
                return f"bank conflicts, {self.share:.0f} % of wavefronts (busiest: {busiest}, then {second})"
            case _:
                return f"{self.kind}, {self.share:.0f} % busy" + (f" (next: {second})" if second else "")


def limiter(
    counters: Mapping[str, float],
    *,
    time_us: float | None,
    ceilings: Ceilings | None,
    floor_us: float | None,
    multiprocessors: int | None = None,
) -> Limit | None:
    """What limits one call, from its folded counters (names of metrics.py); None where they tell nothing.

    ``time_us`` is the bench's time of the call. Without ``ceilings`` L2 and shared memory are not known, and the
    GPU's ``multiprocessors`` are those that the caller knows of. ``floor_us`` is the least time that the operation can
    take: its bytes over the measured bandwidth, or its arithmetic over the measured rate.
    """
    shares = dict(sorted(_shares(counters, ceilings).items(), key=lambda each: -each[1]))
    conflicts = _percent(counters.get(_CONFLICTS), counters.get(_WAVEFRONTS))
    missing: tuple[Kind, ...] = tuple(unit for unit in _UNITS if unit not in shares)
    if conflicts is None:
        missing += ("bank conflicts",)
    launch = _launch(shares, counters.get(_GRID), ceilings.multiprocessors if ceilings else multiprocessors, time_us)
    if not shares and not launch:
        return None
    kind, share = ("launch", None) if launch else _kind(shares, conflicts, missing)
    stall = next(iter(top_stalls(counters, 1)), None)
    reached = 100 * floor_us / time_us if floor_us is not None and time_us else None
    return Limit(kind, share, shares, stall, launch, missing, floor_us, reached)


def _shares(counters: Mapping[str, float], ceilings: Ceilings | None) -> dict[Unit, float]:
    """How busy each unit is, in percent; only those that are known. Bytes per nanosecond are GB/s."""
    shares = {unit: counters[metric] for unit, metric in _BUSY.items() if metric in counters}
    duration_ns = counters.get(DURATION)
    if ceilings and duration_ns:
        if _SECTORS in counters:
            shares["L2"] = 100 * 32 * counters[_SECTORS] / duration_ns / ceilings.l2_read
        if _WAVEFRONTS in counters:
            shares["shared memory"] = 100 * 128 * counters[_WAVEFRONTS] / duration_ns / ceilings.shared_read
    return shares


def _kind(
    shares: Mapping[Unit, float], conflicts: float | None, missing: tuple[Kind, ...]
) -> tuple[Kind, float | None]:
    """From the units' shares, the busiest first. Conflicts come first: they are what keeps shared memory busy."""
    (busiest, share), *others = shares.items()
    second = others[0][1] if others else 0.0
    shared = shares.get("shared memory", 0.0)
    costly = conflicts is not None and conflicts >= CONFLICTED and conflicts * shared / 100 >= LOST
    free = all(each < SATURATED for unit, each in shares.items() if unit != "shared memory")
    if costly and free and (shared >= SATURATED or not missing):
        return "bank conflicts", conflicts
    if not missing and second >= LOW and share - second < BALANCED:
        return "balanced", share
    if share >= SATURATED:
        return busiest, share
    return ("undecided" if missing else "latency"), None


def _launch(
    shares: Mapping[Unit, float], blocks: float | None, multiprocessors: int | None, time_us: float | None
) -> str:
    """Why the launch itself is the limit: too few blocks to saturate anything, or too short a call; else empty."""
    free = all(shares.get(unit, 0.0) < SATURATED for unit in _OF_ALL)
    if blocks is not None and multiprocessors is not None and blocks < multiprocessors and free:
        return f"{blocks:.0f} blocks for {multiprocessors} multiprocessors"
    if time_us is not None and time_us < LAUNCH_US:
        return f"the whole call takes {time_us:.1f} µs"
    return ""


def _percent(part: float | None, whole: float | None) -> float | None:
    """None where either is not known; nothing of nothing is 0 %."""
    if part is None or whole is None:
        return None
    return 100 * part / whole if whole else 0.0

"""A GPU's own sensors (clocks, power, throttling), read by NVML while something runs.

The chip is power-limited and its clocks drift, so times compare only together with them. A value is None if NVML, the
package nvidia-ml-py or that sensor is missing: timing works without.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

_THROTTLE = {
    0x002: "applications_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bits of NVML's clock event reasons; bit 0, an idle GPU, is no throttling and left out."""
_POLL_S = 0.002


class Readings:
    """Samples of the sensors of one GPU, each taken when ``take`` is called.

    ``device_index`` counts as CUDA does, within CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, device_index: int = 0) -> None:
        self._gpu = _Gpu(device_index)
        self._samples: list[dict[str, Any]] = []
        self._full_mhz: float = self._gpu.sm_clock_max_mhz() or 0.0

    def take(self) -> None:
        self._samples.append(self._gpu.readings())

    def wait_for_full_clock(self, timeout_s: float = 2.0) -> None:
        """Wait until the SM clock is at its maximum; at once if NVML does not tell, at most until the timeout.

        A clock that does not get there in time, for example because it is locked lower, counts as full from then on.
        """
        deadline, highest = time.monotonic() + timeout_s, 0.0
        while (clock := self._gpu.sm_clock_mhz()) is not None and clock < self._full_mhz:
            highest = max(highest, clock)
            if time.monotonic() > deadline:
                self._full_mhz = highest
                return
            time.sleep(_POLL_S)

    def summary(self) -> dict[str, float | str | None]:
        """Medians of the samples, the highest power, and all throttle reasons seen, joined by ``+``, or ``none``."""

        def over_samples(key: str, reduce: Callable[[list[float]], float]) -> float | None:
            values = [sample[key] for sample in self._samples if sample[key] is not None]
            return round(reduce(values), 1) if values else None

        masks = [sample["throttle_mask"] for sample in self._samples if sample["throttle_mask"] is not None]
        reasons = [name for bit, name in _THROTTLE.items() if any(mask & bit for mask in masks)]
        return {
            "sm_clock_mhz": over_samples("sm_clock_mhz", statistics.median),
            "memory_clock_mhz": over_samples("memory_clock_mhz", statistics.median),
            "power_w": over_samples("power_w", statistics.median),
            "power_max_w": over_samples("power_w", max),
            "temperature_c": over_samples("temperature_c", statistics.median),
            "throttle": ("+".join(reasons) or "none") if masks else None,
        }


class Sampler(Readings):
    """Takes samples in a thread while the body of a ``with`` runs: at once, and then every ``period_s`` seconds."""

    def __init__(self, device_index: int = 0, period_s: float = 0.02) -> None:
        super().__init__(device_index)
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Sampler:
        if self._gpu.handle is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._gpu.handle is not None:
            self._thread.join()

    def _sample(self) -> None:
        while True:
            self.take()
            if self._stop.wait(self._period_s):
                return


def identity(device_index: int = 0) -> dict[str, Any]:
    """A GPU's properties by NVML; a value is None if NVML does not tell it.

    The UUID is given as the first 12 digits of its SHA-256: enough to tell two GPUs apart, and no serial number.
    """
    gpu = _Gpu(device_index)
    nvml, read = gpu.nvml, gpu.read
    uuid = read(lambda: nvml.nvmlDeviceGetUUID(gpu.handle))
    return {
        "driver": read(lambda: nvml.nvmlSystemGetDriverVersion()),
        "uuid_sha256_12": hashlib.sha256(uuid.encode()).hexdigest()[:12] if uuid else None,
        "power_limit_w": read(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu.handle) / 1e3),
        "pcie_generation": read(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu.handle)),
        "pcie_width": read(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu.handle)),
        "sm_clock_max_mhz": gpu.sm_clock_max_mhz(),
        "memory_clock_max_mhz": read(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu.handle, nvml.NVML_CLOCK_MEM)),
        "memory_bus_bits": read(lambda: nvml.nvmlDeviceGetMemoryBusWidth(gpu.handle)),
        "mig": read(lambda: bool(nvml.nvmlDeviceGetMigMode(gpu.handle)[0])),
        "ecc": read(lambda: bool(nvml.nvmlDeviceGetEccMode(gpu.handle)[0])),
    }


class _Gpu:
    """One GPU in NVML; ``handle`` is None if NVML has none."""

    def __init__(self, device_index: int) -> None:
        self.handle: Any = None
        self.nvml: Any = None
        try:
            import pynvml
        except ImportError:
            return
        self.nvml = pynvml
        self.handle = self.read(lambda: _handle(pynvml, device_index), anyway=True)

    def read(self, reading: Callable[[], Any], anyway: bool = False) -> Any:
        """One value, or None if the GPU, the driver or the package does not offer it."""
        if self.handle is None and not anyway:
            return None
        try:
            return reading()
        except (self.nvml.NVMLError, AttributeError):
            return None

    def sm_clock_mhz(self) -> Any:
        return self.read(lambda: self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))

    def sm_clock_max_mhz(self) -> Any:
        return self.read(lambda: self.nvml.nvmlDeviceGetMaxClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))

    def readings(self) -> dict[str, Any]:
        nvml, handle = self.nvml, self.handle
        return {
            "sm_clock_mhz": self.sm_clock_mhz(),
            "memory_clock_mhz": self.read(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "power_w": self.read(self._power_w),
            "temperature_c": self.read(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "throttle_mask": self.read(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        }

    def _power_w(self) -> float:
        # nvmlDeviceGetPowerUsage is an average over the last second from Ampere on, too slow for a short test.
        nvml = self.nvml
        instant = self.read(lambda: nvml.nvmlDeviceGetFieldValues(self.handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0])
        if instant is not None and instant.nvmlReturn == nvml.NVML_SUCCESS:
            return float(instant.value.uiVal) / 1e3
        return float(nvml.nvmlDeviceGetPowerUsage(self.handle)) / 1e3


def _handle(nvml: ModuleType, device_index: int) -> Any:
    """NVML's handle of a CUDA device. NVML counts all GPUs in PCI order and ignores CUDA's environment variables.

    With GPUs of several kinds, CUDA counts in the same order only if CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    nvml.nvmlInit()
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    if not visible:
        return nvml.nvmlDeviceGetHandleByIndex(device_index)
    if device_index >= len(visible):
        return None
    entry = visible[device_index]
    return nvml.nvmlDeviceGetHandleByIndex(int(entry)) if entry.isdigit() else nvml.nvmlDeviceGetHandleByUUID(entry)

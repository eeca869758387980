"""Sensors: what a sampler reports, and that everything goes on without them."""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_twins.harness import sensors
from kernel_twins.harness.sensors import Readings, Sampler, identity

SENSORS = {"sm_clock_mhz", "memory_clock_mhz", "power_w", "power_max_w", "temperature_c", "throttle"}


class FakeNvml:
    """The part of pynvml that is used, of a machine with two GPUs; handles are indices."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_SUCCESS, NVML_FI_DEV_POWER_INSTANT = 1, 2, 0, 0, 186

    class NVMLError(Exception):
        pass

    def __init__(self, throttle: int = 0x4 | 0x1, power_status: int = 0) -> None:
        self.throttle, self.power_status = throttle, power_status

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return {"GPU-first": 0, "GPU-second": 1}[uuid]

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return ("GPU-first", "GPU-second")[handle]

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        return 1755 if clock == self.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(nvmlReturn=self.power_status, value=SimpleNamespace(uiVal=698_400))]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return 350_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        raise self.NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        return self.throttle

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:  # noqa: N802
        return 700_000


class Locked(FakeNvml):
    """A GPU whose SM clock is, in turns, what is given, and stays at the last of it; its maximum is 1980."""

    def __init__(self, *clocks: int) -> None:
        super().__init__()
        self.clocks = list(clocks)

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        return self.clocks.pop(0) if len(self.clocks) > 1 else self.clocks[0]


class Clockwork:
    """The time, which goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    clockwork = Clockwork()
    monkeypatch.setattr(sensors, "time", clockwork)
    return clockwork


@pytest.fixture(autouse=True)
def _all_devices_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def sampled(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with Sampler() as sampler:
        pass
    return sampler.summary()


def test_summary_reports_what_the_gpu_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled(FakeNvml(), monkeypatch) == {
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "power_w": 698.4,
        "power_max_w": 698.4,
        "temperature_c": None,  # this GPU does not say
        "throttle": "sw_power_cap",  # and an idle GPU is no throttling
    }


def test_several_throttle_reasons_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled(FakeNvml(throttle=0x4 | 0x20), monkeypatch)["throttle"] == "sw_power_cap+sw_thermal"


def test_no_throttling_differs_from_not_knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled(FakeNvml(throttle=0x1), monkeypatch)["throttle"] == "none"


def test_the_average_power_stands_in_where_the_momentary_one_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled(FakeNvml(power_status=3), monkeypatch)["power_w"] == 350


def test_everything_is_none_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Sampler() as sampler:
        pass
    assert sampler.summary() == dict.fromkeys(SENSORS)
    assert set(identity().values()) == {None}


def test_everything_is_none_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()

    def missing() -> None:
        raise nvml.NVMLError("library not found")

    monkeypatch.setattr(nvml, "nvmlInit", missing)
    assert sampled(nvml, monkeypatch) == dict.fromkeys(SENSORS)
    assert set(identity().values()) == {None}


def test_an_error_in_the_body_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    with pytest.raises(KeyError), Sampler():
        raise KeyError


def test_identity_hides_the_uuid_and_leaves_out_what_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    facts = identity()
    assert facts["uuid_sha256_12"] == hashlib.sha256(b"GPU-first").hexdigest()[:12]
    assert "GPU-first" not in map(str, facts.values())
    assert facts["power_limit_w"] == 700
    assert facts["mig"] is None


@pytest.mark.parametrize("visible", ["1", "1,0", "GPU-second", " 1 "])
def test_the_device_is_counted_as_cuda_counts(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert identity(0)["uuid_sha256_12"] == hashlib.sha256(b"GPU-second").hexdigest()[:12]


def test_a_rest_ends_when_the_clock_is_back(monkeypatch: pytest.MonkeyPatch, clockwork: Clockwork) -> None:
    nvml = Locked(1500, 1700, 1965, 1980)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    readings = Readings()
    readings.wait_for_full_clock()
    assert nvml.clocks == [1980]
    assert 0 < clockwork.now < 0.1
    readings.take()
    assert readings.summary()["sm_clock_mhz"] == 1980


def test_a_clock_that_is_locked_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, clockwork: Clockwork) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Locked(1200, 1410))
    readings = Readings()
    readings.wait_for_full_clock(timeout_s=2.0)
    assert 2.0 < clockwork.now < 2.1
    before = clockwork.now
    readings.wait_for_full_clock(timeout_s=2.0)
    assert clockwork.now == before


def test_without_sensors_nobody_waits(monkeypatch: pytest.MonkeyPatch, clockwork: Clockwork) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    Readings().wait_for_full_clock()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # which does not say what its maximum is
    Readings().wait_for_full_clock()
    assert clockwork.now == 0


@pytest.mark.gpu
def test_the_real_gpu_is_read() -> None:
    pytest.importorskip("pynvml")
    with Sampler() as sampler:
        pass
    summary = sampler.summary()
    assert summary["sm_clock_mhz"]
    assert summary["power_w"]
    assert identity()["driver"]

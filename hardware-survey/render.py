"""Writes a survey down as Markdown. Shares of the datasheet and balance points are computed here, never stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasheets

from kernel_twins.harness.ceilings import Ceilings

_LABELS = {
    "dram_read": "device memory, read",
    "dram_write": "device memory, write",
    "dram_copy": "device memory, copy (read + written)",
    "l2_read": "L2, read",
    "shared_read": "shared memory, read",
    "fma_fp32": "fp32 FMA",
    "mma_bf16": "bf16 tensor, mma.sync",
    "wgmma_bf16": "bf16 tensor, wgmma",
    "launch": "launch, back to back",
    "launch_and_wait": "launch and synchronize, from Python",
    "launch_graph_node": "launch, a node of a CUDA graph of 1000",
    "h2d_pinned": "host to device, pinned",
    "d2h_pinned": "device to host, pinned",
    "h2d_pageable": "host to device, pageable",
    "d2h_pageable": "device to host, pageable",
}
_SHARED_BYTES_PER_CLOCK = 128  # a multiprocessor's 32 banks of 4 bytes
_PCIE_LANE_GBPS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one way, after the line code


def render(survey: Mapping[str, Any]) -> str:
    """The survey as a Markdown document; the same text for the same survey."""
    device, software = survey["device"], survey["software"]
    sheet = datasheets.load().get(survey["gpu"])
    known = f"the {sheet.name} of the datasheet table" if sheet else "not in the datasheet table"
    return "\n".join(
        [
            f"# Hardware survey: {device['name']}",
            "",
            f"`{survey['gpu']}`, {known}. Measured on {survey['date']} by `python hardware-survey/survey.py` with "
            f"driver {_text(software['driver'])}, CUDA {_text(software['cuda'])}, torch {software['torch']}.",
            "",
            "## What it is",
            "",
            datasheets.markdown(["", ""], identity(device)),
            "## Measured ceilings",
            "",
            "Median of n samples and their interquartile range (IQR), on random data; clocks, power, temperature and "
            "throttle reasons were sampled meanwhile. The bf16 ceiling is the best of its rows.",
            "",
            _measurements(survey, sheet),
            "## Balance points",
            "",
            "A kernel that does fewer FLOP per byte read than this is bound by memory, one that does more by "
            "arithmetic.",
            "",
            _balance(survey),
            "## Among other GPUs, by their datasheets",
            "",
            datasheets.table(survey["gpu"]),
        ]
    )


def identity(device: Mapping[str, Any]) -> list[list[str]]:
    """What the device says of itself: rows of a title and a text."""
    link = f"generation {_text(device['pcie_generation'])}, {_text(device['pcie_width'])} lanes"
    clocks = f"SM {_text(device['sm_clock_max_mhz'])} MHz, memory {_text(device['memory_clock_max_mhz'])} MHz"
    return [
        ["compute capability", device["compute_capability"]],
        ["multiprocessors", str(device["multiprocessors"])],
        ["highest clocks", clocks],
        ["memory", f"{number(device['memory_bytes'] / 1024**3)} GiB, bus of {_text(device['memory_bus_bits'])} bits"],
        ["L2", _kib(device["l2_bytes"])],
        ["shared memory per multiprocessor", _kib(device["shared_memory_per_multiprocessor_bytes"])],
        ["shared memory per block, opted in", _kib(device["shared_memory_per_block_bytes"])],
        ["registers per multiprocessor", f"{device['registers_per_multiprocessor']:,}"],
        ["threads per multiprocessor", f"{device['threads_per_multiprocessor']:,}"],
        ["power limit", f"{number(device['power_limit_w'])} W"],
        ["PCIe", link],
        ["ECC, MIG", f"{_switch(device['ecc'])}, {_switch(device['mig'])}"],
        ["UUID (SHA-256, 12 digits)", _text(device["uuid_sha256_12"])],
    ]


def _measurements(survey: Mapping[str, Any], sheet: datasheets.Datasheet | None) -> str:
    titles = ["", "median", "", "IQR", "n", "of the datasheet", "SM MHz", "memory MHz", "W", "W max", "°C", "throttle"]
    rows = []
    for measurement in survey["measurements"]:
        name = measurement["name"]
        limit = datasheet_limit(name, survey["device"], sheet)
        rows.append(
            [
                label(name),
                number(measurement["value"]),
                measurement["unit"].replace("us", "µs"),
                f"{100 * measurement['iqr'] / measurement['value']:.1f} %",
                str(measurement["n"]),
                f"{100 * measurement['value'] / limit:.1f} %" if limit else "-",
                *(number(measurement[key]) for key in ("sm_clock_mhz", "memory_clock_mhz", "power_w", "power_max_w")),
                number(measurement["temperature_c"]),
                _text(measurement["throttle"]).replace("+", ", "),
            ]
        )
    return datasheets.markdown(titles, rows)


def label(name: str) -> str:
    """What a measurement is of, in words."""
    return _LABELS.get(name) or name.replace("mm_bf16_", "bf16 tensor, torch.mm ")


def datasheet_limit(name: str, device: Mapping[str, Any], sheet: datasheets.Datasheet | None) -> float | None:
    """What the datasheet promises for a measurement, in its unit; None where it says nothing.

    Shared memory is reckoned as 128 bytes a clock and multiprocessor at the boost clock, host copies as the PCIe
    link's rate one way.
    """
    if name[:4] in ("h2d_", "d2h_"):
        lane = _PCIE_LANE_GBPS.get(device["pcie_generation"])
        return lane * device["pcie_width"] if lane and device["pcie_width"] else None
    if sheet is None:
        return None
    if name == "shared_read":
        clock, count = sheet.value("boost_clock"), sheet.value("multiprocessors")
        return _SHARED_BYTES_PER_CLOCK * count * clock / 1e3 if clock and count else None
    if name.startswith("dram_"):
        return sheet.value("memory_bandwidth")
    if name == "fma_fp32":
        return sheet.value("fp32")
    return sheet.value("bf16") if "bf16" in name else None


def _balance(survey: Mapping[str, Any]) -> str:
    points = Ceilings.of(survey).balance_points()
    rows = [[kind, number(points[f"{kind}_dram"]), number(points[f"{kind}_l2"])] for kind in ("fp32", "bf16")]
    return datasheets.markdown(["FLOP per byte", "device memory", "L2"], rows)


def number(value: float | None) -> str:
    """Four significant digits, thousands apart."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.4g}'):g}"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _switch(value: bool | None) -> str:
    return {None: "-", True: "on", False: "off"}[value]


def _kib(size: int) -> str:
    return f"{number(size / 1024)} KiB"

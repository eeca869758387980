"""A GPU's measured limits (ceilings), from the hardware survey: the denominators of every percentage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_twins import remedies

_ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = _ROOT / "hardware-survey" / "results"
PRIVATE = _ROOT / "runs"  # ignored by git; surveys of GPUs other than the reference are written there

REFERENCE_GPU = "h100-sxm"
"""The GPU whose measurements are committed."""

_SLUGS = {
    "NVIDIA H100 80GB HBM3": REFERENCE_GPU,
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "Tesla V100-SXM2-16GB": "v100-sxm2",
    "Tesla V100-SXM2-32GB": "v100-sxm2",
}
"""Names that the driver reports, where they do not name the product plainly."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """One GPU's measured limits: memory in GB/s (10^9 bytes), arithmetic in TFLOP/s (10^12, an FMA counts two).

    ``dram_copy`` counts the bytes read and those written. ``bf16`` is dense, with fp32 accumulators: the best rate of
    our probes and of torch.mm on random normal data.
    """

    gpu: str
    dram_read: float
    dram_write: float
    dram_copy: float
    l2_read: float
    shared_read: float
    fp32: float
    bf16: float
    multiprocessors: int

    @classmethod
    def of(cls, survey: Mapping[str, Any]) -> Ceilings:
        """The ceilings in a survey as survey.py writes it."""
        values = {measurement["name"]: measurement["value"] for measurement in survey["measurements"]}
        bf16 = [value for name, value in values.items() if "bf16" in name]
        memory = ("dram_read", "dram_write", "dram_copy", "l2_read", "shared_read")
        return cls(
            survey["gpu"],
            **{name: values[name] for name in memory},
            fp32=values["fma_fp32"],
            bf16=max(bf16),
            multiprocessors=survey["device"]["multiprocessors"],
        )

    def balance_points(self) -> dict[str, float]:
        """FLOP per byte above which a kernel is compute-bound, reading device memory or L2."""
        return {
            "fp32_dram": 1e3 * self.fp32 / self.dram_read,
            "fp32_l2": 1e3 * self.fp32 / self.l2_read,
            "bf16_dram": 1e3 * self.bf16 / self.dram_read,
            "bf16_l2": 1e3 * self.bf16 / self.l2_read,
        }


def gpu_slug(device_name: str) -> str:
    """The short name of a GPU in file names and tables, from the name that CUDA reports.

    ``NVIDIA H100 80GB HBM3`` is ``h100-sxm``, ``NVIDIA GeForce RTX 4090`` is ``rtx-4090``.
    """
    if device_name in _SLUGS:
        return _SLUGS[device_name]
    words = "".join(letter if letter.isalnum() else " " for letter in device_name.lower()).split()
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "amd", "instinct"))


def load(gpu: str) -> Ceilings:
    """The survey of the GPU with that slug: the published one, else this machine's own.

    FileNotFoundError if there is neither.
    """
    paths = (PUBLISHED / f"{gpu}.json", PRIVATE / f"survey-{gpu}.json")
    for path in paths:
        if path.is_file():
            return Ceilings.of(json.loads(path.read_text()))
    published = ", ".join(sorted(path.stem for path in PUBLISHED.glob("*.json"))) or "none"
    command = remedies.told("python hardware-survey/survey.py")
    raise FileNotFoundError(f"gpu is {gpu!r} and has no survey (published: {published}): run {command} on it")

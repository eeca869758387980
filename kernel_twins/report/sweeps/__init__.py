"""Recordings that belong to no run of a ladder: what the compilers make of chosen kernels, stage by stage."""

from __future__ import annotations

from kernel_twins.report.rows.base import ROOT

SWEEPS = ROOT / "profiling" / "sweeps"
"""Beside profiling/data, whose folders are GPUs."""

"""Where things lie; for modules that must do without pandas, too."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "profiling" / "data"
RUNS = ROOT / "runs"  # ignored by git: unfinished runs, and the results of GPUs that are not published
REFERENCE_GPU = "h100-sxm"

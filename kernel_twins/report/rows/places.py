"""Where things lie; for modules that must do without pandas, too."""

from __future__ import annotations

from pathlib import Path

from kernel_twins.harness.ceilings import REFERENCE_GPU as REFERENCE_GPU

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "profiling" / "data"
RUNS = ROOT / "runs"  # ignored by git: unfinished runs, and the results of GPUs that are not published


def shown(path: Path) -> str:
    """A path as messages and documents name it: within the checkout, where it is there."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)

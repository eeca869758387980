"""The documents that are made from data, and whether they still agree with it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kernel_twins._profiling.report import log, plots, readme, store
from kernel_twins.ceilings import Ceilings
from kernel_twins.ceilings import load as load_ceilings

_LOG = store.ROOT / "KERNEL_LOG.md"
_README = store.ROOT / "README.md"
_PLOTS = store.ROOT / "profiling" / "plots"


def render(gpu: str, folder: Path, console: Console) -> None:
    """Write the reference GPU's documents in place, another GPU's log and plots beside its data."""
    ceilings = _ceilings(gpu)
    at_home = gpu == store.REFERENCE_GPU
    log_path, plots_path = (_LOG, _PLOTS) if at_home else (folder / "KERNEL_LOG.md", folder / "plots")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_text(log.render(folder, gpu, ceilings))
    if at_home:
        _README.write_text(readme.render(_README.read_text(), folder, ceilings))
    plots.draw(folder, plots_path, ceilings)
    console.print(f"wrote {_shown(log_path)}{', the table in README.md' if at_home else ''} and {_shown(plots_path)}/")


def disagreements() -> list[str]:
    """What the reference GPU's documents say other than its data does, a line each."""
    gpu, folder = store.REFERENCE_GPU, store.DATA / store.REFERENCE_GPU
    ceilings = _ceilings(gpu)
    lines = []
    if _LOG.read_text() != log.render(folder, gpu, ceilings):
        lines.append("KERNEL_LOG.md disagrees with the data")
    if _README.read_text() != readme.render(_README.read_text(), folder, ceilings):
        lines.append("README.md's table disagrees with the data")
    old = plots.outdated(folder, _PLOTS, ceilings)
    return lines + [f"{_shown(_PLOTS)}/{name}.svg is not drawn from the data" for name in old]


def _ceilings(gpu: str) -> Ceilings | None:
    try:
        return load_ceilings(gpu)
    except FileNotFoundError:
        return None  # no survey of this GPU: shares stay blank


def _shown(path: Path) -> str:
    return str(path.relative_to(store.ROOT))

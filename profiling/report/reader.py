"""From ncu's report to launches, through NVIDIA's own reader: exact values, no units to guess, no CSV to misread.

A process of its own, ``python -m kernel_twins._profiling.report.reader REPORT LAUNCHES``, which writes the launches as
JSON. It imports nothing but the standard library: NVIDIA's crashes in one process with torch's or Arrow's libraries.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kernel_twins._profiling.report.metrics import METRICS


class InvalidReportError(ValueError):
    """A report does not hold what was asked for; nothing of it may be recorded."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One profiled kernel launch, with the label of the NVTX range that it lay in."""

    label: str
    kernel: str
    metrics: dict[str, float]
    units: dict[str, str]


def nvidia_reader() -> ModuleType:
    """NVIDIA's ``ncu_report`` module, from the package index or from beside ncu.

    Our own script has the same name, so the search leaves out its folder.
    """
    ours = Path(__file__).resolve().parents[1]
    folders = [folder for folder in sys.path if Path(folder or ".").resolve() != ours] + list(map(str, _beside_ncu()))
    spec = importlib.machinery.PathFinder.find_spec("ncu_report", folders)
    if spec is None or spec.loader is None:
        raise InvalidReportError(
            "NVIDIA's reader is missing: pip install ncu-report, or put Nsight Compute's ncu on PATH"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules["ncu_report"] = module
    if spec.origin:
        sys.path.append(str(Path(spec.origin).parent))  # the toolkit's copy looks for its library there
    spec.loader.exec_module(module)
    return module


def _beside_ncu() -> list[Path]:
    ncu = shutil.which("ncu")
    if ncu is None:
        return []
    candidates = [Path(ncu).resolve().parent, *Path(ncu).resolve().parents]
    found = [folder / "extras" / "python" for folder in candidates if (folder / "extras" / "python").is_dir()]
    return found or sorted(Path("/opt/nvidia/nsight-compute").glob("*/extras/python"), reverse=True)


def read_report(path: Path) -> list[Launch]:
    """Every labelled launch of a report, in order; InvalidReportError if it is empty or lacks a metric."""
    context = nvidia_reader().load_report(str(path))
    ranges = [context.range_by_idx(index) for index in range(context.num_ranges())]
    launches = [_launch(each.action_by_idx(index)) for each in ranges for index in range(each.num_actions())]
    if not launches:
        raise InvalidReportError(f"{path.name} holds no launch: it is cut short, or no kernel ran inside a label")
    return launches


def _launch(action: Any) -> Launch:
    names = set(action.metric_names())
    kernel = action.name()
    if missing := [metric for metric in METRICS if metric not in names]:
        raise InvalidReportError(f"{kernel}: ncu recorded no {', '.join(missing)}")
    metrics = {metric: float(action.metric_by_name(metric).value()) for metric in METRICS}
    units = {metric: action.metric_by_name(metric).unit() for metric in METRICS}
    return Launch(_label(action), kernel, metrics, units)


def _label(action: Any) -> str:
    state = action.nvtx_state()
    domains = [state.domain_by_id(index) for index in state.domains()] if state else []
    labels: list[str] = [name for domain in domains for name in domain.start_end_ranges() if name.startswith("kl.")]
    if len(labels) != 1:
        raise InvalidReportError(f"{action.name()} lies in {len(labels)} labelled ranges, must lie in one")
    return labels[0]


def main(report: str, launches_file: str) -> int:
    try:
        launches = [dataclasses.asdict(launch) for launch in read_report(Path(report))]
    except InvalidReportError as error:
        print(error)
        return 1
    Path(launches_file).write_text(json.dumps(launches))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

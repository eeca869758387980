"""From ncu's report to rows, through NVIDIA's own reader: exact values, no units to guess, no CSV to misread."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from kernel_twins._profiling.report.metrics import DURATION, METRICS
from kernel_twins._profiling.report.store import COUNTERS


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
    labels: list[str] = [
        name
        for domain in (state.domains() if state else ())
        for name in state.domain_by_id(domain).start_end_ranges()
        if name.startswith("kl.")
    ]
    if len(labels) != 1:
        raise InvalidReportError(f"{action.name()} lies in {len(labels)} labelled ranges, must lie in one")
    return labels[0]


def counter_rows(
    launches: Iterable[Launch], expected: dict[str, int], case: str, run: str, codes: dict[str, str]
) -> pd.DataFrame:
    """Rows for every metric of every launch, in ``expected``'s order of labels.

    ``expected`` says how many launches each label must have; 0 leaves the number open (baselines). InvalidReportError
    names the label that has another number, and a metric that is not a finite number or not a time.
    """
    by_label: dict[str, list[Launch]] = {label: [] for label in expected}
    for launch in launches:
        if launch.label not in by_label:
            raise InvalidReportError(f"label {launch.label} is not one of this operation's cells")
        by_label[launch.label].append(launch)
    rows = []
    for label, found in by_label.items():
        if not found or expected[label] not in (0, len(found)):
            raise InvalidReportError(
                f"{label}: {len(found)} launches were profiled, {expected[label] or 'some'} expected"
            )
        _, _, backend, step = label.split(".")
        for index, launch in enumerate(found):
            if not launch.metrics[DURATION] > 0:
                raise InvalidReportError(f"{label}: duration is {launch.metrics[DURATION]}")
            for metric, value in launch.metrics.items():
                if value != value or abs(value) == float("inf"):
                    raise InvalidReportError(f"{label}: {metric} is {value}")
                cell = (case, backend, "" if step == "baseline" else step, str(index), launch.kernel)
                rows.append((*cell, metric, format(value, ".10g"), launch.units[metric], codes.get(label, ""), run))
    return pd.DataFrame(rows, columns=COUNTERS)

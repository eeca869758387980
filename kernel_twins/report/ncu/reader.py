"""From ncu's report to launches, through NVIDIA's own reader: exact values, no CSV to misread.

A process of its own, ``python -m kernel_twins.report.ncu.reader REPORT OUT.json [--all]``, which writes the
launches as JSON: NVIDIA's module crashes in one process with torch's or Arrow's libraries, so that nothing but the
standard library may be imported here. Exit codes are those of base.py.

A report of ours must have every launch in one labelled range; the registry's metrics are taken from it. With
``--all`` it is anybody's report: all metrics that are numbers, and labels where there are some of ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from kernel_twins.report.ncu.ncu import find
from kernel_twins.report.rows.base import CANNOT_RUN, INVALID_DATA, OK, ROOT, CannotRunError, InvalidDataError
from kernel_twins.report.rows.metrics import METRICS

DEVICE = "device__attribute_display_name"
"""The metric that holds the GPU's name, which is a text."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One profiled kernel launch; ``label`` is that of the NVTX range that it lay in, or empty.

    A metric that the report lacks is in neither mapping. ``units`` are as the report spells them. ``device`` is the
    GPU's name as CUDA reports it, such as ``NVIDIA H100 80GB HBM3``, empty where the report does not tell.
    """

    label: str
    kernel: str
    metrics: dict[str, float]
    units: dict[str, str]
    device: str = ""


def missing(metric: str, recorded: Collection[str]) -> str:
    """What to say of a metric that was not recorded, with the recorded ones whose names are most like it."""
    near = difflib.get_close_matches(metric, recorded, n=3, cutoff=0.5)
    return f"ncu recorded no {metric}" + (f" (the nearest that it recorded: {', '.join(near)})" if near else "")


def the_label(candidates: Iterable[str], where: str, needed: bool) -> str:
    """Our one label among the names of NVTX ranges; empty where there is none and none is needed."""
    labels = sorted({name for name in candidates if name.startswith("kl.")})
    if len(labels) == 1 or not needed:
        return labels[0] if len(labels) == 1 else ""
    raise InvalidDataError(
        f"{where} lies in {len(labels)} labelled ranges ({', '.join(labels) or 'none of kl.*'}), must lie in one: "
        "the report was not made by this tool's `collect`; `extract FILE` reads anybody's"
    )


def find_nvidia_reader() -> ModuleSpec | None:
    """Where NVIDIA's ``ncu_report`` module is: in the environment, or beside ncu; None where it is missing.

    Our own script has the same name, so the search leaves out its folder.
    """
    ours = ROOT / "profiling"
    folders = [folder for folder in sys.path if Path(folder or ".").resolve() != ours]
    return importlib.machinery.PathFinder.find_spec("ncu_report", [*folders, *map(str, _beside_ncu())])


def nvidia_reader() -> ModuleType:
    """NVIDIA's module; CannotRunError where it is missing or not for this Python."""
    spec = find_nvidia_reader()
    if spec is None or spec.loader is None:
        raise CannotRunError("NVIDIA's module ncu_report is not installed")
    module = importlib.util.module_from_spec(spec)
    sys.modules["ncu_report"] = module
    if spec.origin:
        sys.path.append(str(Path(spec.origin).parent))  # the toolkit's copy looks for its library there
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:  # built for another Python or another system
        raise CannotRunError(f"NVIDIA's module ncu_report does not import ({error})") from error
    return module


def _beside_ncu() -> list[Path]:
    try:
        ncu = find().resolve()
    except CannotRunError:
        return []
    found = [folder / "extras" / "python" for folder in ncu.parents if (folder / "extras" / "python").is_dir()]
    return found or sorted(Path("/opt/nvidia/nsight-compute").glob("*/extras/python"), reverse=True)


def read_report(path: Path, everything: bool = False) -> list[Launch]:
    """Every launch of a report, in order; InvalidDataError if there is none, or none of our label where it must be.

    NVIDIA's module loads garbage and reports cut short without a word, as no range or as a range without a launch.
    """
    context = nvidia_reader().load_report(str(path))
    ranges = [context.range_by_idx(index) for index in range(context.num_ranges())]
    if not ranges or not all(each.num_actions() for each in ranges):
        raise InvalidDataError("it holds no launch: it is cut short, no report of ncu, or no kernel was profiled")
    return [_launch(each.action_by_idx(index), everything) for each in ranges for index in range(each.num_actions())]


def _launch(action: Any, everything: bool) -> Launch:
    names, kernel = set(action.metric_names()), action.name()
    metrics, units = {}, {}
    for name in sorted(names) if everything else [name for name in METRICS if name in names]:
        metric = action.metric_by_name(name)
        value = metric.value() if metric is not None else None
        if isinstance(value, int | float):  # others are texts, such as the device's name
            metrics[name], units[name] = value, metric.unit()
    device = str(action.metric_by_name(DEVICE).value()) if DEVICE in names else ""
    return Launch(the_label(_ranges(action), kernel, not everything), kernel, metrics, units, device)


def _ranges(action: Any) -> list[str]:
    """The names of the start/end ranges that the launch lies in."""
    state = action.nvtx_state()
    domains = [state.domain_by_id(index) for index in state.domains()] if state else []
    return [str(name) for domain in domains for name in domain.start_end_ranges()]


def main(report: str, launches_file: str, *flags: str) -> int:
    try:
        launches = [dataclasses.asdict(launch) for launch in read_report(Path(report), "--all" in flags)]
    except CannotRunError as error:
        print(error, file=sys.stderr)
        return CANNOT_RUN
    except InvalidDataError as error:
        print(f"{Path(report).name}: {error}", file=sys.stderr)
        return INVALID_DATA
    Path(launches_file).write_text(json.dumps(launches))
    return OK


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

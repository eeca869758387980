"""What ``backend="auto"`` reads, from the committed rows: ``python -m kernel_twins.report.calls.fastest``.

Run it after timings or sampled rows are published; ``check`` and a test compare the file with the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from kernel_twins import OPS
from kernel_twins.functional.expected import BACKENDS, COMPILED, FILE, HOST, measured
from kernel_twins.functional.function import Function
from kernel_twins.report.calls import functions_table, sampled_table
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import DATA
from kernel_twins.report.rows.recorded import median_us
from kernel_twins.spec import ITEMSIZE, Backend, Case

Times = dict[str, list[float]]  # of a case, by backend: microseconds of the forward pass, and of the backward pass


def derive() -> dict[str, dict[str, dict[str, Times]]]:
    """By GPU and function: the host's times of a call, and the GPU's at every case at which they are all known."""
    derived: dict[str, dict[str, dict[str, Times]]] = {}
    for folder in sorted(path for path in DATA.iterdir() if path.is_dir()):
        calls, sampled = functions_table.read(folder), sampled_table.read(folder)
        times: dict[str, dict[str, Times]] = {}
        for function in FUNCTIONS.values():
            if function.expects:
                found = times.setdefault(function.expects, {})
                found.update(_host(calls, function.name) | _times(folder, sampled, function))
        derived[folder.name] = {name: cases for name, cases in times.items() if cases.keys() - HOST.values()}
    return derived


def _host(calls: pd.DataFrame, function: str) -> dict[str, Times]:
    """The host's times; of a width that was not timed those of another, from which they hardly differ."""
    timed = {width: us for width, us in host_times(calls, function).items() if us.keys() >= {*BACKENDS}}
    return {
        key: {backend: [_short(us[backend])] for backend in BACKENDS}
        for width, key in HOST.items()
        if (us := timed.get(width) or next(iter(timed.values()), None))
    }


def _times(folder: Path, sampled: pd.DataFrame, function: Function) -> dict[str, Times]:
    """Of cases at which all backends were timed: chosen ones, and sampled ones in their place where a case is both.

    Compiled calls are left out where they were not timed.
    """
    chosen: dict[str, dict[str, dict[str, float]]] = {}
    for drawn in dict.fromkeys(function.drawn):
        for direction, op in (("forward", drawn), ("backward", f"{drawn}_backward")):
            if op in function.ops:
                timings = store.read_table(folder, op, "timings")
                chosen.setdefault(direction, {}).update(timed(timings, measured_steps(op, timings)))
    own = sampled[(sampled["function"] == function.name) & (sampled["status"] == "ok")]
    for direction in ("forward", "backward"):
        rows = own[own["pass"] == direction]
        for row in rows.itertuples():
            chosen.setdefault(direction, {}).setdefault(row.case, {})[row.backend] = float(row.us)
    found: dict[str, Times] = {}
    for slug, forward in sorted(chosen["forward"].items()):
        case = Case.parse(slug)
        if not forward.keys() >= {*BACKENDS} or not is_offered(function, case) or measured(case) is None:
            continue
        backward = chosen.get("backward", {}).get(slug, {})
        found[slug] = {
            backend: [
                _short(forward[backend]),
                *([_short(backward[backend])] if backward.keys() >= {*BACKENDS, backend} else []),
            ]
            for backend in (*BACKENDS, COMPILED)
            if backend in forward
        }
    return found


def is_offered(function: Function, case: Case) -> bool:
    """Whether a case of the function's operation is one of the function's: options that it fixes are as it has them."""
    fixed = {name for other in FUNCTIONS.values() if other.drawn == function.drawn for name in _fixed(other)}
    return all(case.get(name) == str(_fixed(function).get(name, "")) for name in fixed)


def _fixed(function: Function) -> Mapping[str, object]:
    options = function.fixed.get("options", function.fixed)
    assert isinstance(options, Mapping)  # or another option is called so
    return options


def _short(us: float) -> float:
    return float(f"{us:.4g}")


def measured_steps(op: str, timings: pd.DataFrame) -> dict[Backend, str]:
    """The step that stands behind a backend on the GPU that was measured; while it was not, the last one that was."""
    timed = {(row.step, row.backend) for row in timings.itertuples()}
    found: dict[Backend, str] = {}
    for backend, (behind, *_) in OPS[op].behind.items():
        names = [step.name for step in OPS[op].steps_of(backend)]
        before = reversed(names[: names.index(behind) + 1])
        found[backend] = next((name for name in before if (name, backend) in timed), behind)
    return found


def host_times(calls: pd.DataFrame, function: str) -> dict[int, dict[str, float]]:
    """The host's time of a call, in microseconds and without gradients, by the elements' size and the backend."""
    times: dict[int, dict[str, float]] = {}
    for row in calls[(calls.kind == "host") & (calls.function == function) & (calls.status == "ok")].itertuples():
        case = Case.parse(row.case)
        if not case.get("grad"):
            times.setdefault(ITEMSIZE[case.dtype], {})[row.backend] = median_us(row)
    return times


def timed(timings: pd.DataFrame, steps: dict[Backend, str]) -> dict[str, dict[str, float]]:
    """The GPU's microseconds by case and backend, of the steps and PyTorch's call in one contest.

    PyTorch's compiled call is timed among the slow ones where it is slow.
    """
    on_gpu: dict[str, dict[str, float]] = {}
    for row in timings[timings.status == "ok"].itertuples():
        is_compiled = row.backend == COMPILED and row.contest in ("fast", "slow")
        is_step = row.contest == "fast" and row.step == steps.get(row.backend, "" if row.backend == "torch" else None)
        if is_compiled or is_step:
            on_gpu.setdefault(row.case, {})[row.backend] = median_us(row)
    return on_gpu


def render() -> str:
    """JSON with a line a case."""
    gpus = (f' "{gpu}": {{\n{_functions(functions)}\n }}' for gpu, functions in derive().items())
    return "{\n" + ",\n".join(gpus) + "\n}\n"


def _functions(functions: Mapping[str, Mapping[str, object]]) -> str:
    return ",\n".join(
        f'  "{name}": {{\n' + ",\n".join(f'   "{slug}": {json.dumps(told)}' for slug, told in cases.items()) + "\n  }"
        for name, cases in functions.items()
    )


if __name__ == "__main__":
    FILE.write_text(render())

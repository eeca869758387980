"""From launches to rows, which are checked before anything of them is recorded."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from kernel_twins._profiling.report.metrics import DURATION
from kernel_twins._profiling.report.reader import InvalidReportError, Launch
from kernel_twins._profiling.report.store import TABLES


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
    return pd.DataFrame(rows, columns=TABLES["counters"])
